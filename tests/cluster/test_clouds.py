# SPDX-License-Identifier: Apache-2.0
"""Pods in VMs that are like a cloud's: they reach Services by name, and their own VMs enforce policies."""

from __future__ import annotations

from tests.cluster.case import Cluster, ClusterCase, container, pod
from tests.cluster.test_nodes import WHO

# With nslookup and nc, because the wget of Debian's static busybox works on emulated processors only.
ADDRESS = "nslookup server.{}.svc.cluster.local | sed -n 's/^Address: //p'"
ASK = r"printf 'GET /cgi-bin/who HTTP/1.0\r\n\r\n' | nc -w 2 $address 80 | grep ::ffff:"
UNTIL_ASKED = "until address=$({}) && {}; do sleep 0.2; done"


class CloudTests(ClusterCase):
    def running(self) -> Cluster:
        cluster = Cluster("clouds", "--provider", "cloud", "--policies")
        self.addCleanup(cluster.stop)
        return cluster.start().wait_until_ready()

    def serve(self) -> None:
        """Run a server that answers each client with the client's address."""
        served = {"tcpSocket": {"port": 8080}, "periodSeconds": 1}
        self.apply(
            pod("server", container("web", WHO, readinessProbe=served)),
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": "server"},
                "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8080}]},
            },
        )
        self.wait_until_ready("server")

    def test_names_of_services_and_policies(self) -> None:
        self.serve()
        asked = UNTIL_ASKED.format(ADDRESS.format(self.namespace), ASK)
        self.apply(pod("client", container("main", asked)))
        address = self.wait_for_phase("client", "Succeeded")["status"]["podIP"]
        self.assertEqual(self.logs("client").split()[-1], f"[::ffff:{address}]")

        self.apply(pod("refused", container("main", f"{asked}; while {ASK}; do sleep 0.1; done")))
        self.wait_until_ready("refused")
        self.apply(
            {
                "apiVersion": "networking.k8s.io/v1",
                "kind": "NetworkPolicy",
                "metadata": {"name": "nobody"},
                "spec": {"podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"]},
            }
        )
        self.wait_for_phase("refused", "Succeeded")
        self.assertIn("[::ffff:", self.logs("refused"))
        self.wait_until_ready("server")  # which shows that the node's probes are let in
