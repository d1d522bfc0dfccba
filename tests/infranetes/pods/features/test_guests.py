# SPDX-License-Identifier: Apache-2.0
"""Pods whose image is a VM of anybody's: the guest is the container, and no agent of ours is in it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import attrs
from twisted.internet.defer import Deferred, fail
from zope.interface import implementer

from infranetes.images import Image
from infranetes.machines.agentless.access import GuestFile, IGuestAccess
from infranetes.machines.agentless.configuration import PodFacts
from infranetes.machines.sandbox_memory import SandboxMemory
from infranetes.pods.features.guests import Guests
from infranetes.pods.node.handler_config import MACHINE
from infranetes.pods.node.inventory import Container, Inventory
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.sandboxes.machine_images import BootSources
from infranetes.pods.store.records import ContainerRecord
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.pods.vm.sandbox_vm import reachable_machines
from infranetes.providers.hypervisor import GuestState, GuestStatus, IBootsImages, IHypervisor
from infranetes.providers.interface import Instance, InstanceSpec, InstanceState
from infranetes.providers.machine_annotations import GuestChoices
from infranetes.providers.machine_images import BaseDisk, Cd, DiskFormat, Firmware
from infranetes_common.concurrency import start
from infranetes_common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.identity import Network
from infranetes_common.reactors import IReactor
from tests.infranetes.machines.agentless.fakes import FakeHypervisor, FakeWay
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fake_images import IMAGE, FakeImages, image
from tests.infranetes.pods.fake_provider import FakeProvider
from tests.infranetes.pods.fakes import FakeNode, box, pod
from tests.support.inline_threads import InlineThreads

OFF = GuestStatus(GuestState.OFF, 5, 9)
BASE = BaseDisk("sha256:" + "d" * 64, Path("/nonexistent"), DiskFormat.QCOW2, 1 << 30, boots_by_uefi=True)


@implementer(IBootsImages)
class BootingProvider(FakeProvider):
    """VMs that boot images of the node. :ivar hypervisors: of all that were launched, by instance."""

    def __init__(self, world: FakeNode) -> None:
        super().__init__(world)
        self.hypervisors: dict[str, FakeHypervisor] = {}

    async def _launch(self, spec: InstanceSpec) -> Instance:
        made = attrs.evolve(await super()._launch(spec), agent_host="127.0.0.1", agent_port=0)
        self.instances[made.id] = made
        self.hypervisors.setdefault(made.id, FakeHypervisor())
        return made

    def hypervisor(self, instance_id: str) -> IHypervisor:
        if instance_id not in self.instances:
            raise NotFound(f"there is no VM {instance_id}")
        return self.hypervisors[instance_id]

    async def _destroy(self, instance_id: str) -> None:
        await super()._destroy(instance_id)
        if instance_id in self.hypervisors:
            self.hypervisors[instance_id].destroyed = True


class Disks:
    """The disk in the only image.

    :ivar base_disk: that disk. :ivar error: why it can't be had.
    :ivar making: a Deferred that is waited for first."""

    def __init__(self) -> None:
        self.base_disk = BASE
        self.error: Exception | None = None
        self.making: Deferred[None] | None = None
        self.holding: Callable[[], Sequence[str]] = list
        self.held: list[Sequence[str]] = []  # the images whose files were kept, at each call

    async def base(self, image: Image) -> BaseDisk:
        self.held.append(self.holding())
        if self.making is not None:
            await self.making
        if self.error is not None:
            raise self.error
        return self.base_disk


class ContainerDisks(FakeImages):
    """The only image is an ordinary one, with a disk in it."""

    image = image()
    machine_images = True


class _Nothing:
    def cds(self, network: Network) -> tuple[Cd, ...]:
        return ()


class Makers:
    """Makes what is known of guests. :ivar way: the way into each of them. :ivar facts: that they got."""

    def __init__(self) -> None:
        self.facts: list[PodFacts] = []
        self.way = FakeWay()
        self.choices: list[GuestChoices] = []

    def ways(
        self, sandbox_id: str, host: str, hypervisor: IHypervisor, choices: GuestChoices
    ) -> Sequence[IGuestAccess]:
        self.choices.append(choices)
        return [self.way]

    async def configuration(
        self, facts: PodFacts, files: Mapping[str, GuestFile], choices: GuestChoices
    ) -> _Nothing:
        self.facts.append(facts)
        return _Nothing()

    async def user_data(self, facts: PodFacts, choices: GuestChoices) -> bytes:
        self.choices.append(choices)
        return b"#cloud-config\n{}\n"


class GuestNode(FakeNode):
    """A node whose pods are guests without our agent."""

    provider: BootingProvider

    def __init__(self, directory: Path) -> None:
        self.makers, self.disks = Makers(), Disks()
        self.memory = SandboxMemory(InlineThreads().reactor, directory, PodFacts)
        super().__init__()

    def make_provider(self) -> FakeProvider:
        return BootingProvider(self)

    def make_images(self) -> FakeImages:
        return ContainerDisks()

    def root_of(self, sandbox_id: str) -> str | None:
        """Return the volume that is the root of a sandbox's VM."""
        return None

    def make_guests(self, inventory: Inventory) -> Guests:
        self.guests = Guests(
            cast(IReactor, self.daemon_clock),
            inventory,
            lambda record: self.node.handlers.of(record),
            self.memory,
            self.makers,
            lambda sandbox, message: self.sandboxes.lost(sandbox, message),
            self.now,
            self.root_of,
        )
        return self.guests

    def make_sources(self, inventory: Inventory, providers: Providers, guests: Guests | None) -> BootSources:
        return BootSources(self.disks, guests=guests)

    def made(self) -> None:
        super().made()
        self.join(self.guests)
        self.disks.holding = lambda: list(self.images.holding)


class GuestCase(PodsTestCase):
    """A node whose pods are guests without our agent."""

    world: GuestNode
    node = GuestNode

    def make_world(self) -> FakeNode:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name) / "guests"
        return self.node(self.directory)

    @property
    def provider(self) -> BootingProvider:
        return self.world.provider

    @property
    def hypervisor(self) -> FakeHypervisor:
        """The hypervisor of the VM that was launched last."""
        return list(self.provider.hypervisors.values())[-1]

    def create(self, sandbox: str) -> Deferred[str]:
        return start(self.world.containers.create(sandbox, box()))

    def created(self, config: Any = None) -> tuple[str, str]:
        """Return the ids of a pod and its container."""
        sandbox = self.run_pod(config)
        return sandbox, self.successResultOf(self.create(sandbox))

    def running(self) -> tuple[str, str]:
        """Return the ids of a pod and its container, which runs."""
        sandbox, container = self.created()
        self.do(self.world.containers.start(container))
        return sandbox, container

    def removing(self, container: str) -> tuple[Deferred[None], Deferred[None]]:
        """Begin to remove a container. Return that, and what has it recorded, as it is then on its way."""
        inventory, recorded = self.world.node.inventory, Deferred[None]()
        save = inventory.save_container

        async def saved(container: Container, record: ContainerRecord) -> None:
            if record.state is ContainerState.REMOVING:
                await recorded
            await save(container, record)

        self.patch(inventory, "save_container", lambda *its: start(saved(*its)))
        return start(self.world.containers.remove(container)), recorded

    def restart(self) -> None:
        """Have the next daemon find what there is, once its provider has started."""
        self.world.restart()
        self.world.wait(1.0)

    def state(self, container: str) -> tuple[ContainerState, int, str]:
        record = self.world.node.inventory.container(container).record
        return record.state, record.exit_code, record.reason

    def assertVacant(self, id: str) -> None:
        """Assert that the sandbox exists, with neither VM nor container."""
        self.assertEqual(self.provider.instances, {})
        self.assertIs(self.record(id).state, SandboxState.VACANT)
        self.assertEqual(self.world.store.contents().containers, ())
        self.assertEqual(self.remembered(), [])

    def remembered(self) -> list[str]:
        """Return the names of the files in which guests are remembered."""
        return [path.name for path in self.directory.iterdir()] if self.directory.exists() else []


class LifeTests(GuestCase):
    """The life of such a pod."""

    def test_a_container_of_an_ordinary_image_boots_the_disk_in_it(self) -> None:
        sandbox, container = self.created()
        [spec] = self.provider.specs
        assert spec.request.boot is not None
        self.assertEqual(spec.request.boot.base, BASE)
        self.assertEqual(self.world.disks.held, [[IMAGE]])
        self.assertEqual(self.world.images.holding, [])
        record = self.record(sandbox)
        self.assertEqual((record.kind, record.state, record.image), (MACHINE, SandboxState.READY, IMAGE))
        self.assertEqual(self.state(container)[0], ContainerState.CREATED)
        self.assertNotIn("execute", self.hypervisor.calls)

    def test_the_hardware_is_what_the_image_boots_by_and_the_pod_asks_for(self) -> None:
        self.created(pod("a", annotations={"infranetes.io/chipset": "pc", "infranetes.io/disk": "40Gi"}))
        boot = self.provider.specs[0].request.boot
        assert boot is not None
        self.assertIs(boot.hardware.firmware, Firmware.UEFI)
        self.assertEqual((boot.hardware.chipset.value, boot.root_bytes), ("pc", 40 << 30))

    def test_a_pod_that_asks_for_the_wrong_firmware_gets_no_vm(self) -> None:
        sandbox = self.run_pod(pod("a", annotations={"infranetes.io/firmware": "bios"}))
        self.failureResultOf(self.create(sandbox), InvalidArgument)
        self.assertVacant(sandbox)

    def test_started_it_executes(self) -> None:
        _, container = self.running()
        self.assertEqual(self.hypervisor.calls.count("execute"), 1)
        self.assertEqual(self.state(container)[0], ContainerState.RUNNING)

    def test_a_guest_that_powers_off_is_a_container_that_has_exited(self) -> None:
        _, container = self.running()
        self.hypervisor.become(OFF)
        self.assertEqual(self.state(container), (ContainerState.EXITED, 0, "Completed"))

    def test_its_sandbox_is_lost_with_it_so_that_the_pod_gets_another_vm(self) -> None:
        sandbox, container = self.running()
        self.hypervisor.become(OFF)
        self.assertEqual(self.state(container), (ContainerState.EXITED, 0, "Completed"))
        self.world.wait(0.25)
        self.assertIs(self.record(sandbox).state, SandboxState.LOST)
        self.do(self.world.sandboxes.stop(sandbox))
        self.assertEqual(self.provider.instances, {})

    def test_a_guest_that_was_never_started_keeps_its_sandbox(self) -> None:
        sandbox, _ = self.created()
        self.assertIs(self.record(sandbox).state, SandboxState.READY)

    def test_a_guest_that_crashes_says_why(self) -> None:
        _, container = self.running()
        self.hypervisor.become(GuestStatus(GuestState.CRASHED, 5, 9, 134, "GuestPanicked", "a panic"))
        self.assertEqual(self.state(container), (ContainerState.EXITED, 134, "GuestPanicked"))

    def test_a_hypervisor_that_is_killed_is_a_vm_that_has_ended(self) -> None:
        sandbox, container = self.running()
        self.provider.end(self.record(sandbox).instance_id, "QEMU was killed")
        self.assertEqual(self.state(container), (ContainerState.EXITED, 137, "VMEnded"))

    def test_stopping_presses_the_power_button(self) -> None:
        sandbox, container = self.running()
        self.do(self.world.containers.stop(container, 30))
        self.assertEqual(self.state(container), (ContainerState.EXITED, 0, "Completed"))
        self.do(self.world.sandboxes.stop(sandbox))
        self.do(self.world.sandboxes.remove(sandbox))
        self.assertNothingLeft()
        self.assertEqual(self.remembered(), [])

    def test_stopping_the_pod_switches_off_what_does_not_obey(self) -> None:
        sandbox, container = self.running()
        self.hypervisor.obeys = False
        self.do(self.world.sandboxes.stop(sandbox))
        self.assertEqual(self.state(container)[0], ContainerState.EXITED)
        self.assertEqual(self.provider.instances, {})

    def test_it_is_not_among_those_whose_certificates_are_renewed(self) -> None:
        self.running()
        self.assertEqual(list(reachable_machines(self.world.node.inventory, self.world.node.pools)), [])

    def test_an_exec_goes_by_the_way_into_the_guest(self) -> None:
        _, container = self.running()
        answer = self.do(self.world.containers.exec_sync(container, ["ls"], 10, 10.0))
        self.assertEqual(answer.stdout, b"ssh")


class SecondTests(GuestCase):
    """What happens second."""

    def test_a_disk_that_can_not_be_had_leaves_the_sandbox_vacant_and_it_is_tried_again(self) -> None:
        sandbox = self.run_pod()
        self.world.disks.error = InvalidArgument("the image has two disks")
        self.failureResultOf(self.create(sandbox), InvalidArgument)
        self.assertVacant(sandbox)
        self.assertEqual(self.provider.specs, [])
        self.world.disks.error = None
        self.successResultOf(self.create(sandbox))

    def test_a_pod_that_is_stopped_while_its_disk_is_made(self) -> None:
        sandbox = self.run_pod()
        self.world.disks.making = Deferred()
        creating = self.create(sandbox)
        self.do(self.world.sandboxes.stop(sandbox))
        self.failureResultOf(creating, Unavailable)
        self.assertEqual(self.provider.specs, [])
        self.do(self.world.sandboxes.remove(sandbox))
        self.assertNothingLeft()

    def test_a_guest_whose_cds_do_not_fit_gets_no_vm(self) -> None:
        sandbox = self.run_pod()
        refused = ResourceExhausted("no room for the CD")

        async def insert(cds: Sequence[Cd]) -> None:
            raise refused

        made = self.provider._launch

        async def launch(spec: InstanceSpec) -> Instance:
            instance = await made(spec)
            self.hypervisor.insert_cds = lambda cds: start(insert(cds))  # type: ignore[method-assign]
            return instance

        self.provider._launch = launch  # type: ignore[method-assign]
        self.failureResultOf(self.create(sandbox), ResourceExhausted)
        self.assertVacant(sandbox)

    def test_one_that_ends_while_its_container_is_removed_leaves_the_sandbox(self) -> None:
        sandbox, container = self.running()
        self.hypervisor.obeys = False
        stopping = start(self.world.containers.stop(container, 5))
        removing = start(self.world.containers.remove(container))
        self.world.wait(30.0)
        self.successResultOf(stopping)
        self.successResultOf(removing)
        self.assertVacant(sandbox)

    def test_so_does_one_that_has_ended_and_whose_removal_is_being_recorded(self) -> None:
        sandbox, container = self.running()
        removing, recorded = self.removing(container)
        self.world.wait(0.25)
        self.assertIs(self.state(container)[0], ContainerState.EXITED)
        self.do(self.world.node.features.sweep())
        self.assertIs(self.record(sandbox).state, SandboxState.READY)
        recorded.callback(None)
        self.successResultOf(removing)
        self.assertVacant(sandbox)

    def test_one_that_ended_while_its_container_could_not_be_removed_is_lost(self) -> None:
        sandbox, container = self.running()
        full = ResourceExhausted("the node's disk is full")
        self.patch(self.world.node.inventory, "save_container", lambda *args: fail(full))
        self.failureResultOf(start(self.world.containers.remove(container)), ResourceExhausted)
        self.do(self.world.node.features.sweep())
        self.assertIs(self.record(sandbox).state, SandboxState.LOST)

    def test_a_second_container_is_refused(self) -> None:
        sandbox, _ = self.created()
        why = self.failureResultOf(
            start(self.world.containers.create(sandbox, box("other"))), FailedPrecondition
        )
        self.assertIn("has one container", str(why.value))

    def test_the_next_daemon_finds_the_guest_running(self) -> None:
        _, container = self.running()
        self.restart()
        self.assertEqual(self.state(container)[0], ContainerState.RUNNING)
        self.hypervisor.become(OFF)
        self.assertEqual(self.state(container), (ContainerState.EXITED, 0, "Completed"))

    def test_the_next_daemon_learns_of_a_guest_that_powered_off_meanwhile(self) -> None:
        _, container = self.running()
        self.world.kill()
        self.hypervisor.become(OFF)
        self.restart()
        self.assertEqual(self.state(container), (ContainerState.EXITED, 0, "Completed"))

    def test_the_next_daemon_ends_the_sandbox_of_a_guest_whose_end_is_recorded(self) -> None:
        sandbox, _ = self.running()
        self.hypervisor.become(OFF)
        self.assertIs(self.record(sandbox).state, SandboxState.READY)
        self.restart()
        self.do(self.world.node.features.sweep())
        self.assertIs(self.record(sandbox).state, SandboxState.LOST)

    def test_the_next_daemon_starts_what_was_only_created(self) -> None:
        _, container = self.created()
        self.restart()
        self.assertEqual(self.state(container)[0], ContainerState.CREATED)
        self.do(self.world.containers.start(container))
        self.assertEqual(self.state(container)[0], ContainerState.RUNNING)

    def test_the_next_daemon_ends_a_boot_that_was_under_way(self) -> None:
        sandbox = self.run_pod()
        self.provider.booting = Deferred()
        self.create(sandbox).addErrback(lambda _: None)
        self.restart()
        self.assertVacant(sandbox)

    def test_removing_the_container_ends_the_vm_and_another_may_boot(self) -> None:
        sandbox, container = self.running()
        self.do(self.world.containers.remove(container))
        self.assertVacant(sandbox)
        self.successResultOf(self.create(sandbox))
        self.world.wait(0.25)
        self.assertEqual(len(self.provider.instances), 1)
        self.assertIs(
            self.record(sandbox).state, SandboxState.READY, "the first guest's end is not the second's"
        )

    def test_an_ended_instance_without_a_reason_is_a_loss(self) -> None:
        sandbox, container = self.running()
        self.world.kill()
        id = self.record(sandbox).instance_id
        self.provider.instances[id] = attrs.evolve(
            self.provider.instances[id], state=InstanceState.ENDED, detail="QEMU was killed"
        )
        self.restart()
        self.world.wait(60.0)
        self.assertEqual(self.state(container)[0], ContainerState.EXITED)


class WithAgent(BootingProvider):
    """VMs that have our agent, in an image of anybody's."""

    async def _launch(self, spec: InstanceSpec) -> Instance:
        made = attrs.evolve(await super()._launch(spec), agent_port=7000)
        self.instances[made.id] = made
        return made


class NodeWithAgents(GuestNode):
    """A node whose pods are guests with our agent."""

    def make_provider(self) -> FakeProvider:
        return WithAgent(self)


class WithAgentTests(GuestCase):
    """Guests with our agent, whose hypervisors are watched beside it."""

    node = NodeWithAgents

    def test_its_sandbox_is_lost_with_it(self) -> None:
        sandbox, _ = self.running()
        self.hypervisor.become(OFF)
        self.assertIs(self.record(sandbox).state, SandboxState.LOST)

    def test_but_stays_when_it_ends_as_its_container_is_removed(self) -> None:
        sandbox, container = self.running()
        removing, recorded = self.removing(container)
        self.hypervisor.become(OFF)
        self.assertIs(self.record(sandbox).state, SandboxState.READY)
        recorded.callback(None)
        self.successResultOf(removing)
        self.assertVacant(sandbox)
        self.assertEqual(self.hypervisor.watched, 0)

    def test_and_while_its_vm_can_not_be_destroyed(self) -> None:
        sandbox, container = self.running()
        self.provider.destroy_error = Unavailable("the host does not answer")
        self.failureResultOf(start(self.world.containers.remove(container)), Unavailable)
        self.hypervisor.become(OFF)
        self.do(self.world.node.features.sweep())
        self.assertIs(self.record(sandbox).state, SandboxState.READY)
        self.provider.destroy_error = None
        self.do(self.world.containers.remove(container))
        self.assertVacant(sandbox)


class AskedForTests(GuestCase):
    """What the pod asks for reaches the guest."""

    def test_annotations_choose_the_ways(self) -> None:
        _, container = self.created(pod("a", annotations={"infranetes.io/guest": "none"}))
        self.do(self.world.containers.start(container))
        self.do(self.world.containers.exec_sync(container, ["ls"], 10, 10.0))
        choices = self.world.makers.choices[-1]
        assert choices.guest is not None
        self.assertEqual(choices.guest.value, "none")

    def test_a_malformed_annotation_is_refused_with_the_sandbox(self) -> None:
        refused = self.failureResultOf(
            self.start(pod("a", annotations={"infranetes.io/guest": "telnet"})), InvalidArgument
        )
        self.assertIn("infranetes.io/guest", str(refused.value))

    def test_a_container_config_is_not_changed(self) -> None:
        _, container = self.created()
        config = self.world.node.inventory.container(container).config
        self.assertEqual(config.image.image, box().image.image)
