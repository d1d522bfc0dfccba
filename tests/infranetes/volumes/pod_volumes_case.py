# SPDX-License-Identifier: Apache-2.0
"""Test cases for a node with volumes, with fakes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from twisted.internet.defer import Deferred, fail, succeed
from twisted.python.monkey import MonkeyPatcher
from zope.interface import implementer

from infranetes.machines.pool_config import PoolConfig
from infranetes.pods.features.guests import Guests
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Inventory
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.sandboxes.machine_images import BootSources
from infranetes.providers.volumes import IHasVolumes, ILendsDevices, VolumeDisk
from infranetes.volumes.pod_volumes import PodVolumes
from infranetes.volumes.published import PublishedVolume
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import IReactor
from infranetes_common.volume_disks import serial_of
from infranetes_common.wire import cri
from tests.infranetes.pods.fake_agent import FakeAgent
from tests.infranetes.pods.fake_provider import FakeProvider
from tests.infranetes.pods.fakes import FakeNode, box, pod
from tests.infranetes.volumes.mounting_case import MountingCase, mounting

DATA, LOGS = "/pods/u1/volumes/kubernetes.io~csi/data/mount", "/pods/u1/volumes/kubernetes.io~csi/logs/mount"
DISK, RO_DISK = "/pods/u1/volumeDevices/kubernetes.io~csi/disk", "/pods/u1/volumeDevices/kubernetes.io~csi/ro"
PUBLISHED: Mapping[str, PublishedVolume] = {
    DATA: PublishedVolume("vol-data", "ext4", ("noatime",), group=7),
    LOGS: PublishedVolume("vol-logs", "xfs", read_only=True),
    "/part": PublishedVolume("vol-data", "ext4", ("noatime",), group=7, below="a/b"),
    DISK: PublishedVolume("vol-disk", ""),
    RO_DISK: PublishedVolume("vol-ro", "", read_only=True),
    "/odd": PublishedVolume("vol-odd", "ext4", ("dax",)),
}

NODE_DEVICES = ("/dev/sdb", "/dev/sdc")


@implementer(ILendsDevices)
class FakeVolumes:
    """Volumes, each attached to one VM at a time, as their provider knows them.

    :ivar at: the VM that has a volume. :ivar calls: in order. :ivar lends: see `ILendsDevices`.
    """

    def __init__(self, provider: FakeProvider) -> None:
        self._provider = provider
        self.at: dict[str, str] = {}
        self.lends = True
        self.calls: list[tuple[str, str, str]] = []
        self.zones: dict[str, str] = {}  # of volumes that are limited to a zone
        self.get_error: Exception | None = None
        self.attach_error: Exception | None = None
        self.detach_error: Exception | None = None
        self.attaching: Deferred[None] | None = None

    def get(self, volume_id: str) -> Deferred[VolumeDisk]:
        if self.get_error is not None:
            return fail(self.get_error)
        return succeed(VolumeDisk(volume_id, 1 << 30, self.zones.get(volume_id, "")))

    def attach(self, instance_id: str, volume_id: str, read_only: bool) -> Deferred[str]:
        return start(self._attach(instance_id, volume_id))

    async def _attach(self, instance_id: str, volume_id: str) -> str:
        self.calls.append(("attach", instance_id, volume_id))
        if self.attach_error is not None:
            raise self.attach_error
        holder = self.at.get(volume_id, instance_id)
        if holder != instance_id and holder in self._provider.instances:
            raise FailedPrecondition(f"{volume_id} is attached to {holder}")
        self.at[volume_id] = instance_id
        if self.attaching is not None:
            await self.attaching
        return serial_of(volume_id)

    def lend(self, path: str) -> Deferred[str]:
        if not self.lends or path != NODE_DEVICES[0]:
            return fail(FailedPrecondition(f"{path} is not listed"))
        return succeed(f"device:{path}")

    def detach(self, instance_id: str, volume_id: str) -> Deferred[None]:
        self.calls.append(("detach", instance_id, volume_id))
        if self.detach_error is not None and instance_id in self._provider.instances:
            return fail(self.detach_error)
        if self.at.get(volume_id) == instance_id:
            del self.at[volume_id]
        return succeed(None)


@implementer(IHasVolumes)
class ProviderWithVolumes(FakeProvider):
    def __init__(self, world: FakeNode) -> None:
        super().__init__(world)
        self.volumes = FakeVolumes(self)


class VolumesNode(FakeNode):
    """:ivar of_pods: the volumes published for pods, by their UIDs, when their VMs are launched."""

    provider: FakeProvider

    def __init__(self, pool: PoolConfig | None = None) -> None:
        self.of_pods: dict[str, list[PublishedVolume]] = {}
        super().__init__(pool)

    def make_provider(self) -> FakeProvider:
        return ProviderWithVolumes(self)

    def make_sources(self, inventory: Inventory, providers: Providers, guests: Guests | None) -> BootSources:
        self.pod_volumes = PodVolumes(cast(IReactor, self.daemon_clock), inventory, providers, self)
        return super().make_sources(inventory, providers, guests)

    def make_features(self) -> list[PodFeature]:
        return [self.pod_volumes, *super().make_features()]

    async def find(self, paths: Sequence[str]) -> list[PublishedVolume | None]:
        return [PUBLISHED.get(path) for path in paths]

    async def find_block_devices(self, paths: Sequence[str]) -> list[str]:
        return [path if path in NODE_DEVICES else "" for path in paths]

    async def find_for_pod(self, uid: str) -> list[PublishedVolume]:
        return self.of_pods.get(uid, [])


class NodeWithoutVolumes(VolumesNode):
    def make_provider(self) -> FakeProvider:
        return FakeProvider(self)


def with_devices(*paths: str, name: str = "main", permissions: str = "mrw") -> cri.ContainerConfig:
    """Return a container with these devices of the node, in kubelet's notation."""
    devices = [
        cri.Device(container_path=f"/dev/x{number}", host_path=path, permissions=permissions)
        for number, path in enumerate(paths)
    ]
    config: cri.ContainerConfig = box(name, devices=devices)
    return config


class PodVolumesCase(MountingCase):
    """Tests on a node with volumes."""

    world: VolumesNode

    def make_world(self) -> FakeNode:
        return VolumesNode()

    @property
    def volumes(self) -> FakeVolumes:
        assert isinstance(self.world.provider, ProviderWithVolumes)
        return self.world.provider.volumes

    @property
    def pod_volumes(self) -> PodVolumes:
        return self.world.pod_volumes

    def instance(self, sandbox: str) -> str:
        return str(self.record(sandbox).instance_id)

    def kept(self) -> list[tuple[str, str]]:
        """Return the recorded volumes, with their VMs."""
        return [(one.id, one.instance_id) for one in self.world.store.contents().attachments]

    def silence_agents(self) -> MonkeyPatcher:
        """Keep the agents of VMs that are launched from now on from answering."""
        make = self.world.make_agent

        def silent(sandbox: str) -> FakeAgent:
            agent = make(sandbox)
            agent.go_away()
            return agent

        patched: MonkeyPatcher = self.patch(self.world, "make_agent", silent)
        return patched

    def second_pod(self) -> str:
        return self.run_pod(pod("db", uid="u2"))


class KilledCase(PodVolumesCase):
    """Kill the daemon before or after each step."""

    def steps(self, *names: str) -> Iterator[tuple[object, str, bool]]:
        holders = {
            "put_attachment": self.world.store,
            "delete_attachment": self.world.store,
            "attach": self.volumes,
            "detach": self.volumes,
            "destroy": self.world.provider,
        }
        for name in names:
            for after in (False, True):
                yield holders.get(name, self.agent), name, after

    def assert_the_next_pod_has_it(self, number: int) -> None:
        self.assertEqual((self.kept(), self.volumes.at), ([], {}))
        sandbox = self.run_pod(pod(f"next{number}", uid=f"n{number}"))
        self.create(mounting(DATA), sandbox)
        self.assertEqual(self.volumes.at, {"vol-data": self.instance(sandbox)})
        self.stop(sandbox)
        self.assertEqual((self.kept(), self.volumes.at), ([], {}))


VOLUMES = [PublishedVolume("vol-data"), PublishedVolume("vol-logs", read_only=True)]


class AtLaunchCase(PodVolumesCase):
    """A pod, `new`, that has volumes published and does not have a VM yet."""

    def setUp(self) -> None:
        super().setUp()
        self.world.of_pods["n1"] = list(VOLUMES)
        self.new = pod("new", uid="n1")

    def assert_nobody_has_them(self) -> None:
        self.assertEqual((self.kept(), self.volumes.at), ([], {}))
