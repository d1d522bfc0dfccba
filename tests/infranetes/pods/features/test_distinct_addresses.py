# SPDX-License-Identifier: Apache-2.0
"""Two pods with one address, of two providers: the later one is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import attrs

from infranetes.pods.features.distinct_addresses import DistinctAddresses
from infranetes.pods.node.handlers import Handler
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.store.states import SandboxState
from infranetes.providers.interface import IPodProvider
from infranetes_common.errors import FailedPrecondition
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fake_provider import FakeProvider
from tests.infranetes.pods.fakes import FakeNode, pod


class Twin(FakeProvider):
    """A provider whose network has the same addresses as the node's own provider's."""

    name = "twin"


class TwinNode(FakeNode):
    """A node with both."""

    def __init__(self, **times: Any) -> None:
        self.twin = Twin(self)
        super().__init__(**times)

    def made(self) -> None:
        node_provider = self.node.providers.add(cast(IPodProvider, self.twin))
        node_provider.trouble = ""
        node_provider.ready.succeed(None)
        self.node.handlers.by_name["twin"] = Handler("twin", node_provider)

    def make_features(self) -> list[PodFeature]:
        return [DistinctAddresses(self.node.inventory), *super().make_features()]


class DistinctAddressTests(PodsTestCase):
    world: TwinNode

    def make_world(self) -> TwinNode:
        return TwinNode()

    def test_the_later_one_is_refused_and_destroyed_and_the_earlier_one_stays(self) -> None:
        id = self.run_pod()
        error = self.failureResultOf(self.start(pod("late", "u2"), "twin"), FailedPrecondition)
        address = self.record(id).address
        for part in (f"the VM of twin has the address {address}", "of fake", "pod_address"):
            self.assertIn(part, str(error.value))
        self.assertEqual((len(self.world.twin.instances), len(self.world.provider.instances)), (0, 1))
        self.assertIs(self.world.node.inventory.sandboxes[id].state, SandboxState.READY)

    def test_it_can_run_once_the_address_is_free(self) -> None:
        self.do(self.world.sandboxes.remove(self.run_pod()))
        self.successResultOf(self.start(pod("late", "u2"), "twin"))

    def test_a_restarted_daemon_refuses_neither_what_runs_nor_what_goes_on(self) -> None:
        id = self.run_pod()
        self.world.restart()
        self.assertIs(self.world.node.inventory.sandboxes[id].state, SandboxState.READY)
        self.failureResultOf(self.start(pod("late", "u2"), "twin"), FailedPrecondition)

    def connected(self, id: str, **record: Any) -> None:
        """Have the feature look at a pod whose VM is up, with this in its record."""
        sandbox = self.world.node.inventory.sandboxes[id]
        sandbox.record = attrs.evolve(sandbox.record, **record)
        DistinctAddresses(self.world.node.inventory).connected(sandbox)

    def test_what_was_up_before_has_no_address_or_meets_one_whose_vm_is_gone_is_left_alone(self) -> None:
        first = self.run_pod()
        self.patch(self.world.twin, "_free_address", lambda: "10.9.9.9")
        second = self.successResultOf(self.start(pod("late", "u2"), "twin"))
        taken = self.record(first).address
        self.assertRaises(
            FailedPrecondition, self.connected, second, state=SandboxState.BOOTING, address=taken
        )
        self.assertRaises(
            FailedPrecondition, self.connected, second, state=SandboxState.LAUNCHING, address=taken
        )
        self.connected(second, state=SandboxState.READY, address=taken)
        other = self.world.node.inventory.sandboxes[first]
        other.record = attrs.evolve(other.record, address="")
        self.connected(second, state=SandboxState.BOOTING, address="")
        other.record = attrs.evolve(other.record, address=taken)
        self.patch(other, "machine", SimpleNamespace(client=None))
        self.connected(second, state=SandboxState.BOOTING, address=taken)

    def test_vms_of_one_provider_are_left_alone(self) -> None:
        first = self.run_pod()
        self.world.provider.instances.clear()  # without the node knowing it
        second = self.successResultOf(self.start(pod("next", "u2")))
        self.assertEqual(self.record(first).address, self.record(second).address)
