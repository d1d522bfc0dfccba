# SPDX-License-Identifier: Apache-2.0
"""A raw volume at the devicePath / is the root of the VM of a pod whose image is the VM."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import attrs
from twisted.internet.defer import Deferred, fail
from zope.interface import implementer

from infranetes.machines.agentless.configuration import PodFacts
from infranetes.pods.features.guests import Guests
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Inventory
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.sandboxes.machine_images import BootSources
from infranetes.pods.store.states import SandboxState
from infranetes.providers.interface import InstanceState
from infranetes.providers.machine_images import BaseDisk, BootDisk, DiskFormat
from infranetes.providers.volumes import IHasVolumes, IKeepsRoots
from infranetes.volumes.pod_volumes import PodVolumes
from infranetes.volumes.published import PublishedVolume
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, Unavailable
from infranetes_common.reactors import IReactor
from infranetes_common.volume_disks import serial_of
from infranetes_common.wire import cri
from tests.infranetes.pods.fake_provider import FakeProvider
from tests.infranetes.pods.fakes import FakeNode, box, pod
from tests.infranetes.pods.features.test_guests import BASE, BootingProvider, GuestCase, GuestNode
from tests.infranetes.pods.sandboxes.test_machine_images import MachineImagesTestCase, Machines
from tests.infranetes.volumes.pod_volumes_case import (
    DATA,
    DISK,
    PUBLISHED,
    RO_DISK,
    FakeVolumes,
    PodVolumesCase,
    VolumesNode,
    with_devices,
)

REPLACE = {"infranetes.io/root": "replace"}


@implementer(IKeepsRoots)
class RootVolumes(FakeVolumes):
    """Volumes that can be roots.

    :ivar filled: the volumes that were asked to be roots, each with whether it might be replaced.
    :ivar root_error: why none can be. :ivar filling: what each filling waits for."""

    _provider: BootingProvider

    def __init__(self, provider: BootingProvider) -> None:
        super().__init__(provider)
        self.filled: list[tuple[str, str, bool]] = []
        self.root_error: Exception | None = None
        self.filling: Deferred[None] | None = None

    def root(self, volume_id: str, base: BaseDisk, replace: bool) -> Deferred[BootDisk]:
        return start(self._root(volume_id, base, replace))

    async def _root(self, volume_id: str, base: BaseDisk, replace: bool) -> BootDisk:
        self.filled.append((volume_id, base.digest, replace))
        if self.filling is not None:
            await self.filling
        if self.root_error is not None:
            raise self.root_error
        return BootDisk("root", Path(volume_id), DiskFormat.RAW, volume=volume_id)

    def is_root(self, instance_id: str, volume_id: str) -> bool:
        """Whether a VM, which there is, was launched with the volume as its root."""
        instance = self._provider.instances.get(instance_id)
        if instance is None:
            return False
        [spec] = [each for each in self._provider.specs if each.token == instance.token]
        root = spec.request.boot.root if spec.request.boot is not None else None
        return root is not None and root.volume == volume_id

    async def _attach(self, instance_id: str, volume_id: str) -> str:
        serial = await super()._attach(instance_id, volume_id)
        return "root" if self.is_root(instance_id, volume_id) else serial

    def detach(self, instance_id: str, volume_id: str) -> Deferred[None]:
        if self.is_root(instance_id, volume_id):
            return fail(Unavailable(f"volume {volume_id} is the root of {instance_id}"))
        return super().detach(instance_id, volume_id)


@implementer(IHasVolumes)
class ProviderWithRoots(BootingProvider):
    def __init__(self, world: FakeNode) -> None:
        super().__init__(world)
        self.volumes = RootVolumes(self)


class RootNode(GuestNode):
    """A node whose guests may have roots that stay. :ivar of_pods: as in `VolumesNode`."""

    def __init__(self, directory: Path) -> None:
        self.of_pods: dict[str, list[PublishedVolume]] = {}
        super().__init__(directory)

    def make_provider(self) -> FakeProvider:
        return ProviderWithRoots(self)

    def make_sources(self, inventory: Inventory, providers: Providers, guests: Guests | None) -> BootSources:
        self.pod_volumes = PodVolumes(cast(IReactor, self.daemon_clock), inventory, providers, self)
        return attrs.evolve(super().make_sources(inventory, providers, guests), roots=self.pod_volumes)

    def make_features(self) -> list[PodFeature]:
        return [self.pod_volumes, *super().make_features()]

    def root_of(self, sandbox_id: str) -> str | None:
        return self.pod_volumes.root_of(sandbox_id)

    find, find_block_devices, find_for_pod = (
        VolumesNode.find,  # type: ignore[assignment]
        VolumesNode.find_block_devices,  # type: ignore[assignment]
        VolumesNode.find_for_pod,  # type: ignore[assignment]
    )


def at_root(path: str = DISK, permissions: str = "mrw") -> cri.ContainerConfig:
    """Return a container whose root is the volume that is published at a path."""
    device = cri.Device(container_path="/", host_path=path, permissions=permissions)
    config: cri.ContainerConfig = box(devices=[device])
    return config


class RootCase(GuestCase):
    """A node whose guests may have roots that stay."""

    world: RootNode

    def make_world(self) -> FakeNode:
        super().make_world()
        return RootNode(self.directory)

    @property
    def volumes(self) -> RootVolumes:
        assert isinstance(self.provider, ProviderWithRoots)
        return self.provider.volumes

    def boots(self, config: cri.ContainerConfig | None = None, name: str = "web", **fields: Any) -> str:
        """Return the sandbox of a pod whose container has been created."""
        self.world.of_pods[name] = [PUBLISHED[DISK]]
        sandbox = self.run_pod(pod(name, uid=name, **fields))
        self.do(self.world.containers.create(sandbox, config or at_root()))
        return sandbox

    def refused(self, config: cri.ContainerConfig, sandbox: str) -> str:
        creating = start(self.world.containers.create(sandbox, config))
        return str(self.failureResultOf(creating, FailedPrecondition).value)

    def kept(self) -> list[tuple[str, str, str]]:
        """Return the recorded volumes, with their VMs and serials."""
        return [(one.id, one.instance_id, one.serial) for one in self.world.store.contents().attachments]

    def ends(self, sandbox: str) -> None:
        self.do(self.world.sandboxes.stop(sandbox))
        self.do(self.world.sandboxes.remove(sandbox))


class RootVolumeTests(RootCase):
    """The life of such a root."""

    def test_the_vm_is_launched_with_it_once_it_is_filled(self) -> None:
        sandbox = self.boots()
        [spec] = self.provider.specs
        assert spec.request.boot is not None
        root = BootDisk("root", Path("vol-disk"), DiskFormat.RAW, volume="vol-disk")
        self.assertEqual(spec.request.boot.root, root)
        self.assertEqual(self.volumes.filled, [("vol-disk", BASE.digest, False)])
        self.assertEqual(self.kept(), [("vol-disk", self.record(sandbox).instance_id, "root")])

    def test_the_guest_is_told_no_disk_and_an_instance_that_is_its_roots(self) -> None:
        self.boots()
        facts: PodFacts = self.world.makers.facts[-1]
        self.assertEqual((facts.root, facts.disks), ("vol-disk", ()))

    def test_a_pod_without_one_has_a_root_that_goes_with_it(self) -> None:
        self.boots(with_devices(DISK))
        [spec] = self.provider.specs
        assert spec.request.boot is not None
        self.assertIsNone(spec.request.boot.root)
        facts = self.world.makers.facts[-1]
        self.assertEqual((facts.root, [disk.serial for disk in facts.disks]), (None, [serial_of("vol-disk")]))

    def test_the_annotation_lets_it_be_replaced(self) -> None:
        self.boots(annotations=REPLACE)
        self.assertEqual(self.volumes.filled, [("vol-disk", BASE.digest, True)])

    def test_the_next_pod_finds_it_again(self) -> None:
        for name in ("web", "again", "third"):
            sandbox = self.boots(name=name)
            self.ends(sandbox)
            self.assertEqual((self.kept(), self.volumes.at), ([], {}))
        self.assertNothingLeft()

    def test_it_is_the_vms_for_as_long_as_that_exists(self) -> None:
        sandbox = self.boots()
        self.provider.destroy_error = Unavailable("QEMU does not end")
        self.failureResultOf(start(self.world.sandboxes.stop(sandbox)), Unavailable)
        self.assertEqual(self.kept(), [("vol-disk", self.record(sandbox).instance_id, "root")])
        self.provider.destroy_error = None
        self.ends(sandbox)
        self.assertEqual(self.kept(), [])

    def test_a_second_pod_is_refused_it_while_it_is_filled_and_while_it_is_had(self) -> None:
        first = self.run_pod(pod("web", uid="web"))
        self.volumes.filling = Deferred()
        creating = start(self.world.containers.create(first, at_root()))
        second = self.run_pod(pod("db", uid="db"))
        for _ in range(2):
            words = self.refused(at_root(), second)
            self.assertIn("one pod's at a time", words)
            self.assertIn(f"config.devices[0] ({DISK} at /)", words)
        self.volumes.filling.callback(None)
        self.volumes.filling = None
        self.successResultOf(creating)
        self.assertIn("one pod's at a time", self.refused(at_root(), second))
        self.assertEqual(len(self.provider.specs), 1)
        self.restart()
        self.assertIn("one pod's at a time", self.refused(at_root(), second))
        self.ends(first)
        self.successResultOf(start(self.world.containers.create(second, at_root())))

    def test_one_that_can_not_be_a_root_leaves_the_sandbox_vacant_and_the_volume_free(self) -> None:
        sandbox = self.run_pod()
        self.volumes.root_error = FailedPrecondition("it is a root made of another image")
        words = self.refused(at_root(), sandbox)
        self.assertIn("config.devices[0]", words)
        self.assertIn("another image", words)
        self.assertVacant(sandbox)
        self.assertEqual((self.kept(), self.provider.specs), ([], []))
        self.volumes.root_error = None
        self.successResultOf(start(self.world.containers.create(sandbox, at_root())))

    def test_a_pod_that_is_stopped_while_it_is_filled_lets_go_of_it(self) -> None:
        sandbox = self.run_pod()
        self.volumes.filling = Deferred()
        creating = start(self.world.containers.create(sandbox, at_root()))
        self.ends(sandbox)
        self.failureResultOf(creating, Unavailable)
        self.assertEqual((self.kept(), self.provider.specs), ([], []))

    def test_a_daemon_that_is_killed_while_it_is_filled_is_followed_by_one_that_fills_it(self) -> None:
        sandbox = self.run_pod()
        self.volumes.filling = Deferred()
        start(self.world.containers.create(sandbox, at_root())).addErrback(lambda _: None)
        self.assertEqual(self.kept(), [("vol-disk", "", "root")])
        self.restart()
        self.volumes.filling = None
        self.assertVacant(sandbox)
        self.assertEqual(self.kept(), [])
        self.successResultOf(start(self.world.containers.create(sandbox, at_root())))
        self.assertEqual(len(self.volumes.filled), 2)

    def test_what_can_be_no_root_is_refused_before_there_is_a_vm(self) -> None:
        sandbox = self.run_pod()
        for config, said in (
            (at_root("/dev/sdc"), "volumeMode: Block"),
            (at_root(DATA), "volumeMounts"),
            (at_root(RO_DISK), "read-only"),
            (at_root(permissions="r"), "read-only"),
        ):
            self.assertIn(said, self.refused(config, sandbox))
        self.assertEqual((self.kept(), self.provider.specs, self.volumes.filled), ([], [], []))

    def test_a_guest_that_has_powered_off_keeps_it_until_its_pod_is_gone(self) -> None:
        sandbox = self.boots()
        [container] = self.world.node.inventory.sandbox(sandbox).containers
        self.do(self.world.containers.start(container))
        self.hypervisor.press_power_button()
        self.world.wait(1.0)
        self.assertIs(self.record(sandbox).state, SandboxState.LOST)
        self.assertEqual({each.state for each in self.provider.instances.values()}, {InstanceState.RUNNING})
        second = self.run_pod(pod("db", uid="db"))
        creating = start(self.world.containers.create(second, at_root()))
        self.failureResultOf(creating, Unavailable)
        self.ends(sandbox)
        self.successResultOf(start(self.world.containers.create(second, at_root())))


class ElsewhereTests(PodVolumesCase):
    """Pods that can have no such root."""

    def test_a_container_has_no_root_of_its_own(self) -> None:
        words = self.refused(FailedPrecondition, at_root())
        self.assertIn("whose image is the VM", words)
        self.assertEqual((self.kept(), self.volumes.calls), ([], []))


class CloudNode(VolumesNode):
    """A node whose cloud has images of machines."""

    def make_images(self) -> Machines:
        return Machines()

    def make_sources(self, inventory: Inventory, providers: Providers, guests: Guests | None) -> BootSources:
        return attrs.evolve(super().make_sources(inventory, providers, guests), roots=self.pod_volumes)


class CloudTests(MachineImagesTestCase):
    def setUp(self) -> None:
        self.world = CloudNode()  # type: ignore[assignment]
        self.world.provider_ready()
        self.addCleanup(self.world.kill)

    def test_a_cloud_boots_none(self) -> None:
        sandbox = self.run_pod()
        words = self.fails(self.create(sandbox, at_root()), FailedPrecondition)
        self.assertIn("RuntimeClass", words)
        self.assertIn(f"config.devices[0] ({DISK} at /)", words)
        self.assertVacant(sandbox)
        self.assertEqual(self.provider.specs, [])
