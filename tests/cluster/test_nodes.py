# SPDX-License-Identifier: Apache-2.0
"""Pods of two nodes reach each other, and see each other's addresses."""

from __future__ import annotations

from tests.cluster.case import Cluster, ClusterCase, container, pod

# Answers with the client's address, which a server of both families sees as [::ffff:A.B.C.D].
WHO = (
    "mkdir -p /www/cgi-bin && cd /www/cgi-bin && printf '#!/bin/sh\\necho; echo $REMOTE_ADDR\\n' >who && "
    "chmod +x who && exec httpd -f -p 8080 -h /www"
)


class NodesTests(ClusterCase):
    def running(self) -> Cluster:
        cluster = Cluster("nodes", "--nodes", "2")
        self.addCleanup(cluster.stop)
        return cluster.start().wait_until_ready()

    def test_the_other_nodes_pods_see_the_address_of_the_pod_itself(self) -> None:
        served = {"tcpSocket": {"port": 8080}, "periodSeconds": 1}
        self.apply(
            pod("server", container("web", WHO, readinessProbe=served), nodeName="node2"),
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": "server"},
                "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8080}]},
            },
        )
        server = self.wait_until_ready("server")["status"]["podIP"]
        urls = (f"http://{server}:8080/cgi-bin/who", "http://server/cgi-bin/who")
        asked = " && ".join(f"wget -q -O - {url}" for url in urls)
        self.apply(pod("client", container("main", asked), nodeName="node"))
        client = self.wait_for_phase("client", "Succeeded")["status"]["podIP"]
        self.assertNotEqual(client.rpartition(".")[0], server.rpartition(".")[0])
        self.assertEqual(self.logs("client").split(), [f"[::ffff:{client}]"] * len(urls))
