# SPDX-License-Identifier: Apache-2.0
"""The CSI driver on its sockets, with volumes that are files, in a directory like kubelet's."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from twisted.internet import reactor as the_reactor
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.trial.unittest import TestCase
from zope.interface import implementer

from infranetes.csi.config import CsiConfig
from infranetes.csi.interface import IPodVolumes, VolumeUse
from infranetes.csi.publisher import Publisher
from infranetes.daemon.csi import CsiService
from infranetes.providers.qemu.vm.vm import Vm
from infranetes.providers.qemu.volumes.attached import VolumeAttacher
from infranetes.providers.qemu.volumes.volumes import QemuVolumes
from infranetes.providers.volumes import IVolumes
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.published_devices import BACKING_FILE
from infranetes_common.concurrency import start
from infranetes_common.errors import InfranetesError, NotFound
from infranetes_common.loop_devices import loop_devices_of, open_loop_device
from infranetes_common.wire import csi
from infranetes_common.wire.csi_rpcs import ControllerStub, IdentityStub, NodeStub
from infranetes_common.wire.pluginregistration_rpcs import RegistrationStub
from tests.support.loop_devices import end_loop_device
from txgrpc import Channel, Code, GrpcError

reactor: Any = the_reactor  # Any: only tests use it

NODE = "node-1"
MIB = 1 << 20


@implementer(IPodVolumes)
class Pods:
    """Pods whose VMs have all volumes.

    :ivar error: the error of every call. :ivar grown: the volumes whose file systems were enlarged.
    :ivar flushed: the volumes that were to be flushed, the paths, and whether each path existed then."""

    def __init__(self) -> None:
        self.error: InfranetesError | None = None
        self.grown: list[str] = []
        self.flushed: list[tuple[str, str, bool]] = []
        self.use = VolumeUse(1000, 300, 700, 50, 20, 30)

    def usage(self, volume_id: str) -> Deferred[VolumeUse]:
        return succeed(self.use) if self.error is None else fail(self.error)

    def flush(self, volume_id: str, target: str) -> Deferred[None]:
        self.flushed.append((volume_id, target, os.path.lexists(target)))
        return succeed(None)

    def grow(self, volume_id: str) -> Deferred[None]:
        if self.error is not None:
            return fail(self.error)
        self.grown.append(volume_id)
        return succeed(None)


def without_vms() -> VolumeAttacher:
    """Return an attacher on a node without VMs."""

    def find(instance_id: str) -> Vm:
        raise NotFound(f"there is no VM {instance_id}")

    return VolumeAttacher(reactor, find, lambda: (), start)


class CsiCase(TestCase):
    """A running driver, and stubs of its services."""

    timeout = 240
    pods: Pods | None = None

    async def setUp(self) -> None:
        self.root = Path(os.path.realpath(tempfile.mkdtemp(prefix="csi-")))  # a socket's path has to be short
        self.addCleanup(shutil.rmtree, self.root, True)
        self.addCleanup(self.unmount_all)
        self.config = CsiConfig(str(self.root))
        self.volumes = await self.make_volumes()
        self.ready = True
        await self.start()
        self.addCleanup(lambda: self.service.stopService())
        self.channel = Channel(reactor, UNIXClientEndpoint(reactor, self.config.socket))
        self.addCleanup(self.channel.close)
        self.identity, self.controller = IdentityStub(self.channel), ControllerStub(self.channel)
        self.node = NodeStub(self.channel)
        registering = Channel(reactor, UNIXClientEndpoint(reactor, self.config.registration_socket))
        self.addCleanup(registering.close)
        self.registration = RegistrationStub(registering)

    async def make_volumes(self) -> IVolumes:
        """Return the volumes that the driver manages: files, unless a test overrides this."""
        return QemuVolumes(reactor, self.root / "volumes", NODE, without_vms())

    async def start(self) -> None:
        """Start a driver that shares no state in memory with an earlier one."""
        publisher = Publisher(reactor, self.volumes, self.pods)
        self.addCleanup(publisher.close)
        self.service = CsiService(reactor, self.config, NODE, publisher, lambda: self.ready, 5.0, self.pods)
        await self.service.startService()

    def unmount_all(self) -> None:
        table = MountTable()
        for one in reversed(list(table.mounts())):
            if one.mount_point.startswith(os.fsencode(f"{self.root}/")):
                subprocess.run(["umount", "-l", os.fsdecode(one.mount_point)], check=True)
        table.close()
        for path in self.loop_devices():
            end_loop_device(path)

    def loop_devices(self) -> list[str]:
        """Return the loop devices of this test's raw volumes."""
        found = []
        for path in loop_devices_of(BACKING_FILE):
            # Devices of other tests running beside this one may disappear at any time, or be another user's.
            with contextlib.suppress(FileNotFoundError, PermissionError), open_loop_device(path) as device:
                if os.fsencode(f'"{self.root}/') in device.read(4096):
                    found.append(path)
        return found

    def target(self, pod: str = "pod-1") -> str:
        return str(self.root / "pods" / pod / "volumes" / "kubernetes.io~csi" / "data" / "mount")

    async def create(self, name: str = "data", **more: Any) -> csi.Volume:  # Any: fields of the request
        request = csi.CreateVolumeRequest(name=name, volume_capabilities=[capability()], **more)
        response: csi.CreateVolumeResponse = await self.controller.CreateVolume(request, timeout=120)
        return response.volume

    async def publish(self, volume_id: str, target: str = "", **more: Any) -> None:  # Any: as above
        request = csi.NodePublishVolumeRequest(
            volume_id=volume_id,
            target_path=target or self.target(),
            **{"volume_capability": capability(), **more},
        )
        await self.node.NodePublishVolume(request, timeout=120)

    async def unpublish(self, volume_id: str, target: str = "") -> None:
        request = csi.NodeUnpublishVolumeRequest(volume_id=volume_id, target_path=target or self.target())
        await self.node.NodeUnpublishVolume(request, timeout=120)

    async def refused(self, code: Code, call: Awaitable[object], words: str = "") -> None:
        """Check that a call fails with this code and these words."""
        try:
            await call
        except GrpcError as error:
            self.assertEqual((error.code, words in error.message), (code, True), error.message)
        else:
            self.fail("it was not refused")


def capability(
    mode: int = csi.VolumeCapability.AccessMode.SINGLE_NODE_WRITER, **mount: Any
) -> csi.VolumeCapability:  # Any: fields of MountVolume
    return csi.VolumeCapability(
        access_mode=csi.VolumeCapability.AccessMode(mode=mode),  # type: ignore[arg-type]
        mount=csi.VolumeCapability.MountVolume(**mount),
    )


def raw(mode: int = csi.VolumeCapability.AccessMode.SINGLE_NODE_WRITER) -> csi.VolumeCapability:
    """Return the capability of a raw block volume."""
    found = csi.VolumeCapability(block=csi.VolumeCapability.BlockVolume())
    found.access_mode.mode = mode  # type: ignore[assignment]
    return found
