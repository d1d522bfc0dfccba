# SPDX-License-Identifier: Apache-2.0
"""NetworkPolicies of a large cluster: no step of the work blocks the reactor for long.

Measured is the processor time of each step, which does not depend on other work on the machine. The reactor
can turn between two steps.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from ipaddress import IPv4Address
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes.kubernetes.kinds import Kind
from infranetes.kubernetes.watch import Put, Replaced
from infranetes.policies.interface import LocalPod
from tests.harness.speed import slowness
from tests.infranetes.policies.objects import block, expression, labelled, namespace, pod, policy, port
from tests.infranetes.policies.world import World

Json = dict[str, Any]  # Any: JSON

PODS, NAMESPACES, POLICIES, BROAD, LOCAL = 10_000, 100, 1_000, 100, 100
# Milliseconds for one step, on the machine of `slowness`. A turn of the reactor ends with the step in which
# 10 of them are exceeded.
MOST = 40.0


class Steps:
    """Take steps. :ivar longest: the longest processor time of one, in milliseconds, and what it did."""

    def __init__(self) -> None:
        self.longest = (0.0, "")

    def do(self, what: str, steps: Iterable[None]) -> None:
        gc.collect()
        gc.disable()
        try:
            self._do(what, steps)
        finally:
            gc.enable()

    def _do(self, what: str, steps: Iterable[None]) -> None:
        began = time.thread_time_ns()
        for _ in steps:
            self._took(what, began)
            began = time.thread_time_ns()
        self._took(what, began)

    def _took(self, what: str, began: int) -> None:
        self.longest = max(self.longest, ((time.thread_time_ns() - began) / 1e6, what))


class ScaleTests(SynchronousTestCase):
    """10,000 pods, and 1,000 policies in the namespace of the 100 pods that are on the node."""

    def setUp(self) -> None:
        self.world, self.steps = World(), Steps()
        self.replace(self.world.namespaces, [namespace(f"n{each}") for each in range(NAMESPACES)])
        self.replace(self.world.pods, [self.pod(each) for each in range(PODS)])
        for each in range(LOCAL):
            name = f"p{each * NAMESPACES}"
            self.world.model.add(LocalPod(name, "n0", name, name, {}))

    def pod(self, number: int, shift: int = 0, **labels: str) -> Json:
        its = {"app": f"a{number % 37}", **labels}
        address = str(IPv4Address("10.0.0.0") + 2 * number + shift)
        names = [port("http", 8000 + number % 50)]
        return pod(f"p{number}", address, namespace=f"n{number % NAMESPACES}", labels=its, ports=names)

    def replace(self, kind: Kind, items: list[Json]) -> None:
        self.steps.do(f"all {kind.path}", kind.take(Replaced([kind.trimmed(item) for item in items])))

    def have(self, policies: list[Json]) -> None:
        self.replace(self.world.policies, policies)
        self.settle("all firewalls")

    def settle(self, what: str) -> int:
        changed: set[str] = set()
        self.steps.do(what, self.world.model.settle(changed))
        return len(changed)

    def everyone(self, number: int) -> Json:
        """Return a peer that selects all pods and differs from every other peer."""
        return {"namespaceSelector": {}, "podSelector": expression(f"none-{number}", "DoesNotExist")}

    def narrow(self, number: int) -> Json:
        its = {"namespaceSelector": {}, "podSelector": labelled(app=f"a{number % 37}")}
        selected = labelled(app=f"a{number % 37}")
        name = f"narrow-{number}"
        return policy(name, selected, "n0", ingress=[{"from": [its]}], egress=[{"to": [its]}])

    def check(self) -> None:
        milliseconds, what = self.steps.longest
        self.assertLess(milliseconds, MOST * slowness(), what)

    def test_policies_and_peers_that_mean_all_pods(self) -> None:
        peers = [self.everyone(each) for each in range(BROAD)]
        alone, together = peers[: BROAD // 2], peers[BROAD // 2 :]
        made = [policy("broad", {}, "n0", ingress=[{"from": together}], egress=[{"to": together}])]
        for number, each in enumerate(alone):
            rule = {"from": [each], "ports": [{"port": 80}]}
            made.append(policy(f"broad-{number}", {}, "n0", ingress=[rule]))
        self.have(made + [self.narrow(each) for each in range(POLICIES - len(made))])
        self.steps.do("a pod", self.world.pods.take(Put(self.pod(1, shift=1))))
        self.assertEqual(self.settle("a pod's address"), LOCAL)
        self.check()

    def test_all_pods_by_many_ports_and_by_names(self) -> None:
        rules = [{"to": [self.everyone(0)], "ports": [{"port": each}]} for each in range(1, 201)]
        rules += [{"to": [self.everyone(each)], "ports": [{"port": "http"}]} for each in range(10)]
        rules += [{"to": [block("10.0.0.0/17")], "ports": [{"port": "http"}]}]
        self.have([policy("ports", {}, "n0", egress=rules)])
        self.check()

    def test_thousands_of_blocks(self) -> None:
        peers = [block(f"{IPv4Address('172.16.0.0') + 4 * each}/31") for each in range(9_000)]
        made = [policy(f"blocks-{each}", {}, "n0", ingress=[{"from": peers[each::2]}]) for each in range(2)]
        self.have(made)
        self.check()
