# SPDX-License-Identifier: Apache-2.0
"""Long operations pause after so many of their objects, and not more often."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from types import ModuleType

from twisted.trial.unittest import SynchronousTestCase

from infranetes.kubernetes.fields import Name
from infranetes.kubernetes.watch import Put
from infranetes.policies import firewall, model, objects
from infranetes.policies import slots as slots_module
from infranetes.policies.objects import NamedPort, Pod
from infranetes.policies.slots import Slots
from tests.infranetes.policies.objects import Json, expression, labelled, namespace, pod, policy, port
from tests.infranetes.policies.world import World, finish

FEW, MANY = 7, 12  # of the objects that an operation goes through
STEP = 4


def pauses(steps: Generator[None, None, object]) -> int:
    """Return how often an operation pauses."""
    return finish(steps)


class StepTests(SynchronousTestCase):
    def in_steps(self, module: ModuleType) -> None:
        """Have a module pause after few objects."""
        self.patch(module, "STEP", STEP)

    def assert_pauses(self, counts: Sequence[int]) -> None:
        """Assert that MANY objects are gone through in as many steps more than FEW as they should be."""
        few, many = counts
        self.assertEqual(many - few, MANY // STEP - FEW // STEP)

    def world(self, pods: int, *policies: Json) -> World:
        """Return a world of a local pod and some others."""
        world = World()
        world.put(world.namespaces, namespace("ns", team="red"))
        for each in range(pods):
            ports = [port("http", 80)]
            world.put(world.pods, pod(f"p{each}", f"10.0.0.{each}", labels={"app": "a"}, ports=ports))
        world.add_local(pod("web"))
        world.put(world.policies, *policies)
        return world

    def settled(self, world: World) -> int:
        """Return how often settling pauses."""
        return finish(world.model.settle(set()))

    def test_going_through_slots(self) -> None:
        self.in_steps(slots_module)
        for number in (FEW, MANY):
            slots = Slots()
            slots.put(Pod(Name("ns", "a"), "a", {}, tuple(range(number)), (NamedPort("http", "TCP", 80),)))
            its = slots.mask(Name("ns", "a"))
            self.assertEqual(pauses(slots.addresses(its)), number // STEP)
            self.assertEqual(pauses(slots.within(its, lambda _: True)), number // STEP)
            self.assertEqual(pauses(slots.having(its, lambda _: True)), number // STEP + 1)

    def test_reading_a_policys_peers(self) -> None:
        self.in_steps(objects)
        items = [policy(ingress=[{"from": [{"podSelector": {}}] * number}]) for number in (FEW, MANY)]
        self.assert_pauses([pauses(objects.policy(item)) for item in items])

    def test_allowing_peers(self) -> None:
        self.in_steps(firewall)
        peer = {"ipBlock": {"cidr": "10.0.0.0/8"}}
        made = [policy(ingress=[{"from": [peer] * number}]) for number in (FEW, MANY)]
        self.assert_pauses([self.settled(self.world(0, each)) for each in made])

    def test_looking_for_a_pods_policies(self) -> None:
        self.in_steps(model)
        policies = [policy(f"p{each}", labelled(app="none")) for each in range(MANY)]
        self.assert_pauses([self.settled(self.world(0, *policies[:number])) for number in (FEW, MANY)])

    def test_selecting_pods(self) -> None:
        self.in_steps(model)
        made = policy(ingress=[{"from": [{"podSelector": {}}]}])
        self.assert_pauses([self.settled(self.world(number, made)) for number in (FEW, MANY)])

    def test_a_namespaces_labels(self) -> None:
        self.in_steps(model)
        counts = []
        for number in (FEW, MANY):
            peers = [{"namespaceSelector": labelled(team="blue")}, {"namespaceSelector": labelled(team="no")}]
            names = [{"port": "http"}, {"port": "other"}]
            world = self.world(number, policy(ingress=[{"from": peers}], egress=[{"ports": names}]))
            world.settle()
            blue = namespace("ns", team="blue")
            # One step for each selection of several namespaces, of which one now means all the pods.
            counts.append(finish(world.namespaces.take(Put(blue))))
            self.assertEqual(counts[-1], 4 + number // STEP)

    def test_a_pod_that_several_may_select(self) -> None:
        self.in_steps(model)
        counts = []
        for number in (FEW, MANY):
            peers = [{"podSelector": expression("a", "NotIn", str(each))} for each in range(number)]
            world = self.world(0, policy(ingress=[{"from": peers}]))
            world.settle()
            counts.append(finish(world.pods.take(Put(pod("new", "10.0.0.1")))))
        self.assert_pauses(counts)
