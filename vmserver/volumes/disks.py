# SPDX-License-Identifier: Apache-2.0
"""The disks that belong to the pod: found by their serial numbers, and mounted as `BASE/SERIAL/directory`.

A disk on which anything is found is never formatted: only one that is empty for blkid, and all zeros at its
beginning and end.
"""

from __future__ import annotations

import os
from pathlib import Path

import attrs
from twisted.internet.defer import DeferredLock

from infranetes_common.concurrency import run_in_thread, shielded, sleep
from infranetes_common.errors import FailedPrecondition, NotFound, Unavailable
from infranetes_common.reactors import IReactor
from infranetes_common.volume_disks import OPTIONS, TARGET
from vmserver.layers.disks import ScsiDisks
from vmserver.mounts import Flag, mount, mounts, sync, unmount_unused
from vmserver.volumes import filesystems

APPEAR_SECONDS = 30.0
_LOOK_SECONDS = 0.1
DIRECTORY = "directory"


@attrs.frozen
class DiskMount:
    """How a disk is to be mounted. :ivar options: checked. :ivar group: whose its files are to be."""

    serial: str
    filesystem: str
    options: list[str]
    read_only: bool = False
    group: int | None = None


@attrs.frozen
class DiskSpace:
    """What is left on a mounted disk. :ivar disk: its own size in bytes."""

    space: filesystems.Space
    disk: int


class PodDisks:
    """Mounts, measures and unmounts disks, one at a time.

    :param base: a directory of mount points.
    """

    def __init__(self, reactor: IReactor, base: Path, disks: ScsiDisks) -> None:
        self._reactor = reactor
        self._base = base
        self._disks = disks
        self._lock = DeferredLock()

    async def mount(self, wanted: DiskMount) -> None:
        """Mount a disk, with a file system made on it if it is blank. Idempotent.

        It goes on when this is cancelled: half a file system could be neither mounted nor made again.

        :raise Unavailable: it does not appear. :raise FailedPrecondition: it holds something else."""
        await shielded(self._mount(wanted))

    async def _mount(self, wanted: DiskMount) -> None:
        async with self._lock:
            point = self._point(wanted.serial)
            device = await self._appeared(wanted.serial)
            if not await run_in_thread(self._reactor, os.path.ismount, point):
                await self._check_content(wanted, device)
                await run_in_thread(self._reactor, _thd_mount, wanted, device, point)
            if wanted.read_only:
                return
            await self._grow(device, wanted.filesystem, point)
            if wanted.group is not None:
                await run_in_thread(self._reactor, filesystems.give_to_group, str(point), wanted.group)

    async def unmount(self, serial: str) -> None:
        """Write what is pending, unmount a disk, and have the kernel forget it. Idempotent.

        :raise FailedPrecondition: something uses it; what was pending is written."""
        await shielded(self._unmount(serial))

    async def _unmount(self, serial: str) -> None:
        async with self._lock:
            await run_in_thread(self._reactor, self._thd_unmount, serial)

    async def usage(self, serial: str, *, grow: bool) -> DiskSpace:
        """Measure a disk. :param grow: fill it with its file system first. :raise NotFound: not mounted."""
        point = self._point(serial)
        if not await run_in_thread(self._reactor, os.path.ismount, point):
            raise NotFound(f"disk {serial} is not mounted in this VM")
        async with self._lock:
            if grow:
                [found] = [one for one in mounts() if one.point == str(point)]
                await self._grow(await self._appeared(serial), found.kind, point)
            space = await run_in_thread(self._reactor, filesystems.space, str(point))
            size = await run_in_thread(self._reactor, filesystems.size_of, await self._appeared(serial))
        return DiskSpace(space, size)

    def _point(self, serial: str) -> Path:
        return self._base / serial / DIRECTORY

    async def _appeared(self, serial: str) -> str:
        """The disk's device, once it is there."""
        until = self._reactor.seconds() + APPEAR_SECONDS
        while True:
            device = await run_in_thread(self._reactor, self._disks.with_serial, TARGET, serial)
            if device is not None:
                return device
            if self._reactor.seconds() >= until:
                raise Unavailable(f"no disk with the serial number {serial} appears in this VM; try again")
            await sleep(self._reactor, _LOOK_SECONDS)

    async def _check_content(self, wanted: DiskMount, device: str) -> None:
        """Make a file system on a blank disk.

        :raise FailedPrecondition: there is something that is no such file system."""
        if await run_in_thread(self._reactor, filesystems.begins_as, device, wanted.filesystem):
            return  # whether it is whole is the kernel's to say; no program is needed, which takes long
        found = await filesystems.found_on(self._reactor, device)
        if found or not await run_in_thread(self._reactor, filesystems.is_blank, device):
            raise FailedPrecondition(
                f"the volume holds {found or 'something that is no file system'} where {wanted.filesystem} "
                "is asked for: it is not formatted. Ask for what it holds, or make it all zeros if nothing "
                "of it is needed"
            )
        if wanted.read_only:
            raise FailedPrecondition("the volume is empty, and no file system can be made read-only")
        await filesystems.make(self._reactor, device, wanted.filesystem)

    async def _grow(self, device: str, filesystem: str, point: Path) -> None:
        number = os.stat(device).st_rdev
        await run_in_thread(self._reactor, self._disks.look_at_size, number)
        if await run_in_thread(self._reactor, filesystems.is_smaller, device, filesystem):
            await filesystems.grow(self._reactor, device, filesystem, str(point))

    def _thd_unmount(self, serial: str) -> None:
        point = self._point(serial)
        if not os.path.ismount(point):
            self._disks.forget_unmounted(TARGET, serial)
            return
        device = point.stat().st_dev
        sync(point)
        number = f"{os.major(device)}:{os.minor(device)}"
        # Parts of it may be mounted elsewhere, for containers: what was mounted last is unmounted first.
        points = [one.point for one in mounts() if one.device == number]
        if not all(unmount_unused(each) for each in reversed(points)):
            raise FailedPrecondition(
                f"disk {serial} is still used in this VM; what was written to it is on the disk"
            )
        self._disks.forget(device)


def _thd_mount(wanted: DiskMount, device: str, point: Path) -> None:
    point.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = Flag.NO_DEVICES
    for option in wanted.options:
        flags |= OPTIONS[option]
    if wanted.read_only:
        flags |= Flag.READ_ONLY
    options = filesystems.options_of(wanted.filesystem, wanted.options)
    mount(device, str(point), wanted.filesystem, Flag(flags), options)
