# SPDX-License-Identifier: Apache-2.0
"""Volumes of VMs of this node: raw files in one directory. See `files` and `snapshots`.

Whoever attaches a volume to a VM has its file locked (flock) for as long as the VM has it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from twisted.internet.defer import DeferredLock
from zope.interface import implementer

from infranetes.providers.machine_images import BaseDisk, BootDisk
from infranetes.providers.qemu.volumes.attached import VolumeAttacher
from infranetes.providers.qemu.volumes.copies import Copies
from infranetes.providers.qemu.volumes.files import VolumeFiles, id_of
from infranetes.providers.qemu.volumes.lent_devices import LentDevices
from infranetes.providers.qemu.volumes.room import UNIT
from infranetes.providers.qemu.volumes.roots import Roots
from infranetes.providers.qemu.volumes.snapshots import QemuSnapshots
from infranetes.providers.volumes import IHasSnapshots, IKeepsRoots, ILendsDevices, VolumeDisk
from infranetes_common.concurrency import KeyedLock, deferred, run_in_thread, shielded
from infranetes_common.reactors import IReactor

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TOPOLOGY = "infranetes.io/node"
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


@implementer(IHasSnapshots, IKeepsRoots, ILendsDevices)
class QemuVolumes:
    """See `IHasSnapshots`. Calls that change something are served one after the other, unless they copy.

    :param directory: made when first needed. :param node: the node's name. :param attacher: has the VMs.
    :param devices: the block devices of the node that pods may have. :param qemu_img: the program."""

    unit = UNIT

    def __init__(
        self,
        reactor: IReactor,
        directory: Path,
        node: str,
        attacher: VolumeAttacher,
        devices: Sequence[str] = (),
        qemu_img: str = "qemu-img",
    ) -> None:
        self._reactor = reactor
        self._attacher = attacher
        self._files = VolumeFiles(directory)
        self._lent = LentDevices(devices)
        self.lends = bool(devices)
        self._lock = DeferredLock()
        self._in_work: KeyedLock[str] = KeyedLock()
        self._copies = Copies(reactor, self._files, attacher, self._lock)
        self._roots = Roots(reactor, self._files, qemu_img)
        self.snapshots = QemuSnapshots(
            reactor, self._files, self._copies, attacher, self._in_work, self._lock
        )
        self.topology: Mapping[str, str] = {TOPOLOGY: label(node)}

    @deferred
    async def create(self, name: str, size: int) -> VolumeDisk:
        return await shielded(self._create(name, size))

    async def _create(self, name: str, size: int) -> VolumeDisk:
        async with self._in_work.held(id_of(name)):
            return await self._alone(self._files.create, name, size)

    @deferred
    async def delete(self, volume_id: str) -> None:
        await shielded(self._delete(volume_id))

    async def _delete(self, volume_id: str) -> None:
        async with self._in_work.held(volume_id), self._copies.none_of(volume_id):
            self._attacher.check_no_root(volume_id)
            await self._alone(self._files.delete, volume_id)

    @deferred
    async def expand(self, volume_id: str, size: int) -> VolumeDisk:
        return await shielded(self._expand(volume_id, size))

    async def _expand(self, volume_id: str, size: int) -> VolumeDisk:
        async with self._copies.none_of(volume_id):
            disk = await self._alone(self._files.expand, volume_id, size)
            # Also if an earlier call was cut short before this.
            await self._attacher.grown(volume_id, disk.size)
        return disk

    @deferred
    async def get(self, volume_id: str) -> VolumeDisk:
        return await run_in_thread(self._reactor, self._files.get, volume_id)

    @deferred
    async def list(self) -> list[VolumeDisk]:
        return await run_in_thread(self._reactor, self._files.all)

    @deferred
    async def free(self) -> int:
        return await self._alone(self._files.free)

    @deferred
    async def attach(self, instance_id: str, volume_id: str, read_only: bool) -> str:
        path = await run_in_thread(self._reactor, self.thd_path, volume_id)
        async with self._copies.none_of(volume_id):
            return await self._attacher.attach(instance_id, volume_id, path, read_only)

    @deferred
    async def detach(self, instance_id: str, volume_id: str) -> None:
        async with self._copies.none_of(volume_id):
            await self._attacher.detach(instance_id, volume_id)

    @deferred
    async def root(self, volume_id: str, base: BaseDisk, replace: bool) -> BootDisk:
        self._attacher.check_no_root(volume_id)
        async with self._copies.none_of(volume_id):
            return await self._roots.root(volume_id, base, replace)

    def being_given(self, volume_id: str) -> AbstractAsyncContextManager[None]:
        """Let nothing copy a volume during the block, in which a VM gets it as its root."""
        return self._copies.none_of(volume_id)

    @deferred
    async def stop(self) -> None:
        """End what is being copied, or filled."""
        await self._roots.stop()
        await self._copies.stop()

    @deferred
    async def lend(self, path: str) -> str:
        return await run_in_thread(self._reactor, self._lent.id_of, path)

    def thd_path(self, volume_id: str) -> Path:
        """Return a volume's file, or block device. Blocks. :raise NotFound: there is none."""
        return self._lent.path_of(volume_id) or self._files.existing(volume_id)

    async def _alone(self, work: Callable[[*Ts], T], *arguments: *Ts) -> T:
        async with self._lock:
            return await run_in_thread(self._reactor, work, *arguments)


def label(node: str) -> str:
    """Return a node's name as a value of one of Kubernetes' labels."""
    return node if _LABEL.fullmatch(node) else "node-" + hashlib.sha256(node.encode()).hexdigest()[:40]
