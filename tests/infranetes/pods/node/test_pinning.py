# SPDX-License-Identifier: Apache-2.0
"""The node's processors and memory nodes hold for the VM's process, and never reach its guest."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.defer import Deferred, fail, succeed
from zope.interface import alsoProvides

from infranetes.cri import translate
from infranetes.pods.node.pinning import guests
from infranetes.providers.interface import IPinsVms
from infranetes_common.concurrency import start
from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri
from tests.infranetes.pods.case import ContainersTestCase, PodsTestCase
from tests.infranetes.pods.fakes import FakeNode, box


def limits(cpus: str = "", mems: str = "", **more: Any) -> Any:
    return cri.LinuxContainerResources(cpuset_cpus=cpus, cpuset_mems=mems, **more)


def pinned(name: str, cpus: str = "", mems: str = "", **more: Any) -> Any:
    return box(name, linux=cri.LinuxContainerConfig(resources=limits(cpus, mems, **more)))


class PinningTests(ContainersTestCase):
    """A provider whose VMs are processes of the node."""

    def setUp(self) -> None:
        super().setUp()
        self.pins: list[tuple[str, str]] = []
        self.trouble: Exception | None = None
        provider = cast(Any, self.world.provider)
        provider.pin = self.pin
        alsoProvides(provider, IPinsVms)

    def pin(self, instance_id: str, cpus: str, mems: str) -> Deferred[None]:
        self.assertEqual(instance_id, self.record(self.sandbox).instance_id)
        self.pins.append((cpus, mems))
        return fail(self.trouble) if self.trouble is not None else succeed(None)

    def made(self, config: Any) -> str:
        made = self.do(self.world.containers.create(self.sandbox, config))
        self.do(self.world.containers.start(made))
        return str(made)

    def told(self, id: str) -> tuple[str, str]:
        """Return what ContainerStatus says."""
        status = translate.container_status(self.world.node.inventory.container(id))
        return status.resources.linux.cpuset_cpus, status.resources.linux.cpuset_mems

    def updates(self) -> list[Any]:
        """Have the agent's updates recorded from now on."""
        found: list[Any] = []
        real = self.agent.update

        async def update(id: str, resources: Any) -> Any:
            found.append(resources)
            return await real(id, resources)

        self.patch(self.agent, "update", update)
        return found

    def test_the_vm_has_what_its_containers_have_together(self) -> None:
        first = self.made(pinned("first", "2-3,8", "0"))
        second = self.made(pinned("second", "4", "1"))
        self.made(box("third"))
        self.assertEqual(self.pins, [("2-3,8", "0"), ("2-4,8", "0-1")])
        self.assertEqual((self.told(first), self.told(second)), (("2-3,8", "0"), ("4", "1")))
        self.agent.become(first, cri.CONTAINER_EXITED)
        self.assertEqual(self.pins[2:], [("4", "1")])
        self.do(self.world.containers.remove(second))
        self.assertEqual(self.pins[3:], [("", "")])

    def test_an_update_pins_anew_and_is_told_also_by_the_next_daemon(self) -> None:
        made = self.made(pinned("first", "0-1", memory_limit_in_bytes=1 << 20))
        updates = self.updates()
        for _ in range(2):
            self.do(self.world.containers.update(made, limits("2-3")))
        self.assertEqual(self.pins, [("0-1", ""), ("2-3", "")])
        self.assertEqual(updates, [])
        self.do(self.world.containers.update(made, limits("3", "0", cpu_shares=77)))
        self.assertEqual([(each.cpuset_cpus, each.cpu_shares) for each in updates], [("", 77)])
        self.assertEqual(self.told(made), ("3", "0"))
        kept = cri.ContainerConfig.FromString(self.kept(made).config)
        self.assertEqual(kept.linux.resources.cpuset_cpus, "3")

    def test_one_that_asks_for_nothing_is_the_guests_as_it_is(self) -> None:
        for config in (cri.ContainerConfig(), box(), box(linux=cri.LinuxContainerConfig())):
            self.assertIs(guests(config), config)

    def test_the_guest_gets_none_of_it(self) -> None:
        self.made(pinned("first", "0-3", "0", unified={"cpuset.cpus": "0-3", "memory.high": "1000"}))
        (created,) = self.agent.created
        resources = created.linux.resources
        self.assertEqual(
            (resources.cpuset_cpus, resources.cpuset_mems, dict(resources.unified)),
            ("", "", {"memory.high": "1000"}),
        )

    def test_what_the_node_refuses_is_refused_and_nothing_changes(self) -> None:
        made = self.made(pinned("first", "0"))
        self.trouble = InvalidArgument("the node has no such processors")
        self.failureResultOf(start(self.world.containers.update(made, limits("99"))), InvalidArgument)
        self.assertEqual(self.told(made), ("0", ""))
        refused = start(self.world.containers.create(self.sandbox, pinned("other", "99")))
        self.failureResultOf(refused, InvalidArgument)
        self.assertEqual(list(self.world.node.inventory.containers), [made])


class CloudTests(PodsTestCase):
    """A provider whose VMs are elsewhere."""

    def test_they_are_told_and_do_nothing(self) -> None:
        self.world = FakeNode()
        self.world.provider_ready()
        self.addCleanup(self.world.kill)
        sandbox = self.run_pod()
        made = self.do(self.world.containers.create(sandbox, pinned("first", "0-3", "0")))
        self.do(self.world.containers.start(made))
        self.patch(self.world.agents[sandbox], "update", self.fail)
        self.do(self.world.containers.update(made, limits("1")))
        status = translate.container_status(self.world.node.inventory.container(made))
        self.assertEqual(status.resources.linux.cpuset_cpus, "1")
