# SPDX-License-Identifier: Apache-2.0
"""What the daemon answers about NetworkPolicies, and how infranetes-ctl prints it."""

from __future__ import annotations

import argparse
import json
from ipaddress import ip_network
from pathlib import Path
from typing import Any, cast

from infranetes.control import policies as module
from infranetes.control.policies import PolicyCalls
from infranetes.ctl.render import as_json, as_text
from infranetes.kubernetes.api_server import ApiServer
from infranetes.kubernetes.watch import Put
from infranetes.policies.cluster import ClusterPolicies
from infranetes.policies.interface import LocalPod
from infranetes.policies.kinds import Policies
from infranetes_common.concurrency import start
from infranetes_common.errors import NotFound
from infranetes_common.pod_firewall import CLOSED, Allowed, PodFirewall, Ports
from infranetes_common.reactors import IReactor
from infranetes_common.wire import control
from tests.infranetes.cri.support import NO_CALL
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import pod
from tests.infranetes.policies.objects import Json, policy
from tests.infranetes.policies.world import finish


class Cluster(ClusterPolicies):
    """Policies without an API server to follow."""

    complete = True

    def __init__(self, reactor: IReactor) -> None:
        super().__init__(reactor, ApiServer(reactor, Path("none")))
        self._policies = Policies(self._model)

    def have(self, id: str, *policies: Json) -> None:
        """Set a local pod in the namespace `default`, and the policies."""
        self.add(LocalPod(id, "default", "web", "uid", {}))
        for steps in list(self._waiting):
            finish(steps)
        for each in policies:
            finish(self._policies.take(Put(each)))
        finish(self._model.settle(set()))


class InForce:
    def __init__(self) -> None:
        self.firewalls: dict[str, PodFirewall] = {}
        self.troubles: dict[str, str] = {}

    def in_force(self, id: str) -> PodFirewall | None:
        return self.firewalls.get(id)

    def trouble(self, id: str) -> str:
        return self.troubles.get(id, "")


class PoliciesTests(PodsTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.cluster = Cluster(cast(IReactor, self.world.clock))
        self.firewalls = InForce()
        self.calls = PolicyCalls(self.world.node.inventory, self.cluster, self.firewalls)
        self.sandbox = self.run_pod(pod("web"))

    def have(self, *policies: Json) -> None:
        """Set the policies, and have them in force."""
        self.cluster.have(self.sandbox, *policies)
        found = self.cluster.firewall(self.sandbox)
        assert found is not None
        self.firewalls.firewalls[self.sandbox] = found

    def asked(self, pod: str = "") -> control.GetPoliciesResponse:
        request = control.GetPoliciesRequest(pod=pod)
        answer: control.GetPoliciesResponse = self.do(self.calls.GetPolicies(request, NO_CALL))
        return answer

    def text(self, pod: str = "default/web") -> str:
        return as_text("policies", self.asked(pod), argparse.Namespace(pod=pod))

    def document(self, pod: str = "") -> Any:  # Any: JSON
        return json.loads(json.dumps(as_json("policies", self.asked(pod), argparse.Namespace(pod=pod))))

    def test_a_pod_that_no_policy_selects(self) -> None:
        self.have(policy(namespace="other"))
        (found,) = self.document()["pods"]
        self.assertEqual((found["policies"], found["ingress"], found["egress"]), ([], None, None))
        self.assertTrue(found["current"])
        text = self.text()
        self.assertIn("no policy selects it", text)
        self.assertIn("it receives everything", text)
        self.assertIn("it sends everything", text)

    def test_which_policies_and_what_they_come_to(self) -> None:
        block = {"ipBlock": {"cidr": "192.0.2.0/24"}}
        ports = [{"port": 80}, {"port": 5000, "endPort": 5010, "protocol": "UDP"}]
        self.have(
            policy("closed", namespace="default", policyTypes=["Ingress", "Egress"]),
            policy("some", namespace="default", ingress=[{"from": [block], "ports": ports}]),
        )
        (found,) = self.document(self.sandbox)["pods"]
        self.assertEqual(
            found["policies"],
            [
                {"name": "default/closed", "ingress": True, "egress": True},
                {"name": "default/some", "ingress": True, "egress": False},
            ],
        )
        allowed = {"networks": ["192.0.2.0/24"], "network_count": 1, "ports": ["tcp 80", "udp 5000-5010"]}
        self.assertEqual((found["ingress"], found["egress"]), ([allowed], []))
        text = self.text()
        self.assertIn("policy default/some: Ingress", text)
        self.assertIn("tcp 80, udp 5000-5010 from 192.0.2.0/24", text)
        self.assertIn("it sends nothing", text)
        row = self.text("").splitlines()[1].split()
        self.assertEqual(row[1:4], ["default/web", "some", "nothing"])

    def test_what_is_in_force_is_said_and_not_what_is_to_be(self) -> None:
        self.have(policy("closed", namespace="default"))
        self.firewalls.firewalls[self.sandbox] = PodFirewall(
            (Allowed((ip_network("10.0.0.0/8"),), (Ports("TCP", 80, 80),)),)
        )
        self.firewalls.troubles[self.sandbox] = "nft is busy"
        text = self.text()
        self.assertIn("in force: an earlier one: nft is busy", text)
        self.assertIn("tcp 80 from 10.0.0.0/8", text)

    def test_a_pod_whose_policies_are_not_known_is_closed(self) -> None:
        text = self.text()
        self.assertIn("in force: not known", text)
        self.assertIn("it receives nothing, but from its own node", text)
        self.assertFalse(self.document()["pods"][0]["known"])

    def test_how_old_is_what_is_known_while_the_api_server_is_away(self) -> None:
        answer = control.GetPoliciesResponse(enabled=True, complete=True)
        for listed in (True, False):
            answer.followed.add(path="/api/v1/pods", trouble="refused", listed=listed, heard_seconds=90)
        troubles = as_json("policies", answer, argparse.Namespace(pod=""))["troubles"]
        self.assertEqual(troubles, ["/api/v1/pods: refused; known as of 90s ago", "/api/v1/pods: refused"])

    def test_many_networks_are_counted(self) -> None:
        self.patch(module, "MOST_SHOWN", 2)
        networks = tuple(ip_network(f"10.{number}.0.0/16") for number in range(0, 10, 2))
        self.firewalls.firewalls[self.sandbox] = PodFirewall((Allowed(networks),), CLOSED.egress)
        self.assertIn("everything from 10.0.0.0/16, 10.2.0.0/16", self.text())
        (found,) = self.document()["pods"]
        self.assertEqual((len(found["ingress"][0]["networks"]), found["ingress"][0]["network_count"]), (2, 5))

    def test_where_policies_do_not_hold(self) -> None:
        self.calls = PolicyCalls(self.world.node.inventory, None, None)
        self.assertFalse(self.document()["enabled"])
        self.assertIn("don't hold on this node", self.text())

    def test_a_pod_that_is_not_there(self) -> None:
        request = control.GetPoliciesRequest(pod="default/none")
        self.failureResultOf(start(self.calls.GetPolicies(request, NO_CALL)), NotFound)
