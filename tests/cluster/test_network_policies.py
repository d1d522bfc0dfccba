# SPDX-License-Identifier: Apache-2.0
"""NetworkPolicies of a real API server, for a daemon that has only kubelet's rights and those of the docs."""

from __future__ import annotations

import time
from typing import Any

from tests.cluster.case import ClusterCase, Manifest, container, pod, states, until

# Serves a page, and on another port sends one client a word again and again.
SERVER = """
mkdir /www && echo page >/www/index.html && touch /www/ready && httpd -p 8080 -h /www
(while sleep 0.2; do echo tick; done) | nc -l -p 9000
"""
DNS = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
SECONDS = 90.0  # until a change is seen; so long because each look runs programs in a VM


def policy(name: str, selected: str, **spec: Any) -> Manifest:  # Any: JSON
    """Return a policy for the pods with `app: selected`."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": {"podSelector": {"matchLabels": {"app": selected}}, **spec},
    }


def service(name: str, **ports: int) -> Manifest:
    """Return a Service of the pods with `app: name`."""
    listed = [{"name": each, "port": port} for each, port in ports.items()]
    spec = {"selector": {"app": name}, "publishNotReadyAddresses": True, "ports": listed}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


class NetworkPolicyTests(ClusterCase):
    def test_policies_hold_from_their_making_on_for_connections_that_there_are_too(self) -> None:
        self.begin()
        self.apply(policy("web", "web", policyTypes=["Ingress"]))
        until(lambda: not self.reaches(), "nobody reaches the server", SECONDS)
        until(self.stands_still, "the connection is cut", SECONDS)
        self.assert_probed()

        allowed = {"from": [{"podSelector": {"matchLabels": {"app": "client"}}}], "ports": [{"port": 8080}]}
        self.apply(policy("web", "web", ingress=[allowed]))
        until(self.reaches, "the client reaches its port", SECONDS)
        self.assertTrue(self.stands_still(), "the other port is closed still")
        self.here("label", "pod", "client", "app=stranger", "--overwrite")
        until(lambda: not self.reaches(), "a pod that is no client any more can't", SECONDS)
        self.here("delete", "networkpolicy", "web")
        until(self.reaches, "without policies everyone can", SECONDS)

        self.apply(policy("out", "stranger", policyTypes=["Egress"]))
        until(lambda: not self.resolves(), "what the pod sends is judged too, and DNS with it", SECONDS)
        self.apply(policy("out", "stranger", policyTypes=["Egress"], egress=[{"ports": DNS}]))
        until(self.resolves, "DNS can be allowed alone", SECONDS)
        self.assertFalse(self.reaches())
        for name in ("web", "client"):
            restarts = [each["restartCount"] for each in states(self.get("pod", name)).values()]
            self.assertEqual(set(restarts), {0})

    def begin(self) -> None:
        """Run a server, and a client to which it sends words."""
        probe = {"httpGet": {"port": 8080, "path": "/ready"}, "periodSeconds": 1, "timeoutSeconds": 20}
        web = container("web", SERVER, readinessProbe=probe)
        self.apply(service("web", page=8080, words=9000), pod("web", web))
        self.wait_until_ready("web")
        words = container("words", f"sleep 10000 | nc {self.name()} 9000")
        self.apply(pod("client", container("main", "exec sleep 10000"), words))
        self.wait_until_ready("client")
        until(lambda: not self.stands_still(), "the client hears the server", SECONDS)
        until(self.reaches, "the client reaches the server", SECONDS)

    def name(self) -> str:
        """The server's DNS name."""
        return f"web.{self.namespace}.svc.cluster.local"

    def succeeds(self, *command: str) -> bool:
        """Return whether a command in the client succeeds, and soon."""
        return self.execute("client", "timeout", "3", *command).returncode == 0

    def reaches(self) -> bool:
        """Return whether the client gets the server's page, by the Service's address."""
        address = self.get("service", "web")["spec"]["clusterIP"]
        return self.succeeds("wget", "-q", "-O", "-", f"http://{address}:8080/")

    def resolves(self) -> bool:
        """Return whether the client can resolve the server's name."""
        return self.succeeds("nslookup", self.name())

    def stands_still(self) -> bool:
        """Return whether the client receives no word for some seconds."""
        heard = self.logs("client", "--container=words")
        time.sleep(2)
        return self.logs("client", "--container=words") == heard

    def assert_probed(self) -> None:
        """Assert that kubelet sees the server change."""
        self.execute("web", "rm", "/www/ready")
        self.wait("pod/web", "condition=Ready=false", SECONDS)
        self.execute("web", "touch", "/www/ready")
        self.wait("pod/web", "condition=Ready", SECONDS)
