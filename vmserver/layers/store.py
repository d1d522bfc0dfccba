# SPDX-License-Identifier: Apache-2.0
"""The layers that this VM has, each mounted read-only at a directory of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredLock

from infranetes_common.concurrency import IMAGES, KeyedLock, backoff, run_in_thread, sleep, start
from infranetes_common.errors import FailedPrecondition, ResourceExhausted, Unavailable
from infranetes_common.reactors import IReactor
from vmserver.layers.arrival import Arrival, BroughtLayer, LayerFiles, Stop
from vmserver.layers.disks import ScsiDisks
from vmserver.layers.loop import loop_device
from vmserver.layers.mount_points import MountPoints

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

APPEAR_SECONDS = 5.0  # the longest wait for another disk to appear; an emulated VM's took 0.1 s
LOOK_SECONDS = (0.01, 0.25)  # the first pause between two looks, and the longest
BATCH_BYTES = 1024 * 1024  # the bytes that a thread writes at once


@attrs.frozen
class LayerOnDisk:
    """A layer that the hypervisor shows, and where on the virtio-scsi host."""

    diff_id: str
    target: int
    lun: int


@attrs.frozen
class Arrived:
    """The part of a layer that has arrived in this VM.

    :ivar whole: True if images can be made from it.
    :ivar size: bytes that the node has uploaded; 0 if the layer is a disk.
    :ivar digest: that of the file being uploaded.
    """

    diff_id: str
    whole: bool
    size: int
    digest: str


class LayerStore:
    """The VM's layers. The state is in files and in the kernel, where a restarted agent finds it.

    Layers that the hypervisor attaches as disks must be mounted again after a reboot of the VM
    (`mount_disks`). Uploaded layers are verified and mounted again when they are needed (`need`).

    :param files: the directory of uploaded layers; on a disk.
    :param points: the directory of mount points; emptied by a reboot.
    :param mount: false where simulated VMs share a machine: layers are uploaded and verified, not mounted.
    :ivar changing: held while images come to need layers, and while layers are removed.
    :ivar needed: returns the diff ids of layers that must not be removed. Blocks, and is called in a thread.
    """

    def __init__(
        self,
        reactor: IReactor,
        files: Path,
        points: Path,
        *,
        mount: bool = True,
        disks: ScsiDisks | None = None,
    ) -> None:
        self._reactor = reactor
        self._files = LayerFiles(files)
        self._points = MountPoints(points)
        self._mount = mount
        self._disks = disks or ScsiDisks()
        self._locks: KeyedLock[str] = KeyedLock()  # held while a layer is mounted or unmounted
        self._writing: KeyedLock[str] = KeyedLock()  # held while a layer arrives
        self._arrivals: dict[str, _Arriving] = {}  # the newest call that brings each layer
        self.changing = DeferredLock()
        self.needed: Callable[[], Collection[str]] = tuple

    # Looking up

    def directory(self, diff_id: str) -> Path | None:
        """Return where a layer is mounted; None if it is not. Without mounting, its file.

        It takes two lookups in a file system in memory, so it may be called in the reactor.
        """
        return self._points.mounted(diff_id) if self._mount else self._files.whole(diff_id)

    async def arrived(self, diff_ids: Sequence[str]) -> list[Arrived]:
        """Look up how much of each layer is here."""
        return await self._in_thread(lambda: [self._arrived(diff_id) for diff_id in diff_ids])

    def whole(self, diff_id: str) -> bool:
        """Return whether a layer is mounted, or can be without the node. Blocks."""
        return self._usable(diff_id) is not None or self._files.whole(diff_id) is not None

    async def need(self, diff_ids: Iterable[str]) -> list[Path]:
        """Return each layer's directory, in the same order; mount layers that were uploaded before a reboot.

        :raise FailedPrecondition: a layer is not here. :raise DataLoss: one is damaged, and was deleted.
        """
        wanted = list(diff_ids)
        there = await self._in_thread(lambda: {diff_id: self._usable(diff_id) for diff_id in wanted})
        for diff_id, directory in there.items():
            if directory is None:
                there[diff_id] = await self._mount_file(diff_id)
        found = [directory for diff_id in wanted if (directory := there[diff_id]) is not None]
        missing = [diff_id for diff_id in wanted if there[diff_id] is None]
        if missing:
            raise FailedPrecondition(
                f"layer {missing[0]} is not in this VM ({len(missing)} are not): the node has to attach it "
                "as a disk and call MountLayers, or to send it by PutLayer"
            )
        return found

    # Layers that the hypervisor shows

    async def mount_disks(self, disks: Sequence[LayerOnDisk]) -> None:
        """Mount layers, once their disks have appeared. Idempotent.

        :raise Unavailable: a disk does not appear. :raise FailedPrecondition: a disk holds no layer.
        """
        if disks and not self._mount:
            raise FailedPrecondition("this agent mounts nothing: send layers by PutLayer")
        wanted = await self._in_thread(lambda: [disk for disk in disks if not self._usable(disk.diff_id)])
        devices = await self._appeared(wanted)
        for disk in wanted:
            async with self._locks.held(disk.diff_id):
                await self._in_thread(self._thd_mount_disk, disk.diff_id, devices[disk])

    async def _appeared(self, disks: Sequence[LayerOnDisk]) -> dict[LayerOnDisk, str]:
        """Wait for all disks, as long as they keep appearing; return their devices."""
        found: dict[LayerOnDisk, str] = {}
        last = self._reactor.seconds()
        for pause in backoff(*LOOK_SECONDS):
            missing = [disk for disk in disks if disk not in found]
            if new := await self._in_thread(self._thd_look, missing):
                found |= new
                last = self._reactor.seconds()
            missing = [disk for disk in missing if disk not in found]
            if not missing or self._reactor.seconds() - last >= APPEAR_SECONDS:
                break
            await sleep(self._reactor, pause)
        if missing:
            raise Unavailable(
                f"the disk of layer {missing[0].diff_id} at target {missing[0].target}, LUN {missing[0].lun} "
                f"has not appeared, nor has another in {APPEAR_SECONDS:g} s "
                f"({len(missing)} of {len(disks)} are missing)"
            )
        return found

    # Layers that the node brings

    async def put(self, layer: BroughtLayer, data: AsyncIterator[bytes]) -> None:
        """Write a layer's bytes from its offset on to the disk, verify them and mount the layer.

        If the layer is here already, `data` is not read. What has arrived stays if `data` fails. One call
        at a time brings a layer: a newer one ends the one before it.

        :raise OutOfRange: less than the offset is here.
        :raise InvalidArgument: there is less data than announced, or more.
        :raise DataLoss: it does not have the digest, and is deleted.
        :raise ResourceExhausted: the disk is too full, and what had arrived is deleted.
        :raise Unavailable: a newer call brings the layer, or it was removed.
        """
        older = self._arrivals.get(layer.diff_id)
        this = self._arrivals[layer.diff_id] = _Arriving()
        if older is not None:
            older.end()
        try:
            await this.follow(start(self._put(layer, data)))
        except CancelledError:
            if this.ended:
                raise Unavailable(
                    f"layer {layer.diff_id}: a newer call sends or removes it, and ended this one"
                ) from None
            raise
        finally:
            if self._arrivals.get(layer.diff_id) is this:
                del self._arrivals[layer.diff_id]

    async def _put(self, layer: BroughtLayer, data: AsyncIterator[bytes]) -> None:
        async with self._writing.held(layer.diff_id):
            if await self._in_thread(self._usable, layer.diff_id):
                return
            there = await self._in_thread(self._files.whole, layer.diff_id)
            if there is not None and layer.digest.endswith(there.name):
                await self._mount_file(layer.diff_id)
                return
            stop = Stop()
            arrival = await self._in_thread(self._thd_begin, layer, stop, on_cancel=stop.tell)
            try:
                batch: list[bytes] = []
                size = 0
                async for piece in data:
                    batch.append(piece)
                    size += len(piece)
                    if size >= BATCH_BYTES:
                        await self._in_thread(arrival.write, batch)
                        batch, size = [], 0
                await self._in_thread(arrival.write, batch)
                await self._in_thread(arrival.finish)
            finally:
                arrival.close()
            await self._mount_file(layer.diff_id, verified=True)

    async def _mount_file(self, diff_id: str, verified: bool = False) -> Path | None:
        """Mount a layer that the node has uploaded; return its directory, or None if it has not."""
        stop = Stop()
        async with self._locks.held(diff_id):
            work = partial(self._thd_mount_file, diff_id, verified, stop)
            return await self._in_thread(work, on_cancel=stop.tell)

    # The end

    async def remove(self, diff_ids: Sequence[str], *, unneeded: bool = False) -> None:
        """Unmount layers and delete their files, except those that an image needs. Idempotent.

        :param unneeded: also remove all other layers that no image needs, and remains of failed loads.
        :raise Unavailable: one can't be unmounted.
        """
        async with self.changing:
            needed = await self._in_thread(self.needed)
            there = await self._in_thread(self._thd_all) if unneeded else ()
            for diff_id in (*diff_ids, *there):
                if diff_id in needed:
                    continue
                arriving = self._arrivals.get(diff_id)
                if arriving is not None:
                    arriving.end()
                async with self._writing.held(diff_id), self._locks.held(diff_id):
                    await self._in_thread(self._thd_remove, diff_id)

    # In threads

    async def _in_thread(
        self, work: Callable[[*Ts], T], *args: *Ts, on_cancel: Callable[[], None] | None = None
    ) -> T:
        return await run_in_thread(self._reactor, work, *args, on_cancel=on_cancel, purpose=IMAGES)

    def _arrived(self, diff_id: str) -> Arrived:
        size, digest = self._files.arrived(diff_id)
        return Arrived(diff_id, self.whole(diff_id), size, digest)

    def _usable(self, diff_id: str) -> Path | None:
        """Return a layer's directory, if its disk has not been taken away from under it."""
        directory = self.directory(diff_id)
        if directory is None or not self._mount or self._disks.attached(directory.stat().st_dev):
            return directory
        return None

    def _thd_all(self) -> Sequence[str]:
        """Return the diff ids of all layers that are here, at least in part."""
        return sorted({*self._points.all(), *self._files.all()})

    def _thd_begin(self, layer: BroughtLayer, stop: Stop) -> Arrival:
        """Take more of a layer. If there is no room for it, first delete the remains of failed loads."""
        try:
            return self._files.begin(layer, stop)
        except ResourceExhausted:
            if not self._files.remove_parts(besides=[*self._arrivals]):
                raise
        return self._files.begin(layer, stop)

    def _thd_look(self, disks: Sequence[LayerOnDisk]) -> dict[LayerOnDisk, str]:
        found = {disk: self._disks.appeared(disk.target, disk.lun, disk.diff_id) for disk in disks}
        return {disk: device for disk, device in found.items() if device is not None}

    def _thd_mount_disk(self, diff_id: str, device: str) -> None:
        if not self._usable(diff_id):
            self._points.unmount(diff_id)  # the stale mount of a disk that was unplugged
            self._points.mount(diff_id, device)

    def _thd_mount_file(self, diff_id: str, verified: bool, stop: Stop) -> Path | None:
        path = self._files.whole(diff_id)
        if path is None:
            return None
        directory = self._usable(diff_id)
        if directory is not None:
            return directory
        if not verified:
            self._files.verify(diff_id, stop)
        self._points.unmount(diff_id)
        with loop_device(path) as device:
            return self._points.mount(diff_id, device)

    def _thd_remove(self, diff_id: str) -> None:
        device = self._points.unmount(diff_id)
        if device is not None:
            self._disks.forget(device)
        self._files.remove(diff_id)


class _Arriving:
    """A call that brings a layer.

    :ivar ended: another call ended it.
    """

    def __init__(self) -> None:
        self.ended = False
        self._work: Deferred[None] | None = None

    async def follow(self, work: Deferred[None]) -> None:
        """Wait for the call's work."""
        self._work = work
        await work

    def end(self) -> None:
        """End the call. Idempotent."""
        self.ended = True
        if self._work is not None:
            self._work.cancel()
