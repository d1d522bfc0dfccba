# SPDX-License-Identifier: Apache-2.0
"""The disks that belong to the pod: found by their serial numbers, and mounted as `BASE/SERIAL/directory`.
A disk that containers use as a device is marked by a file, `BASE/SERIAL/raw`, and not mounted.

A disk on which anything is found is never formatted. Only a disk that is all zeros at its beginning and end,
wherever blkid would look, is formatted.

A container that is the VM goes on when the VM reboots, so its disks are mounted again then:

    record   mount point   mounted   what it is
    none     none          no        not this VM's
    there    there or not  no        being mounted, or the VM has rebooted: `restore` mounts it
    there    there         yes       in use
    none     there         yes       being unmounted

The mount point exists only as long as the disk is mounted, so that it is never mistaken for the disk.
"""

from __future__ import annotations

import contextlib
import grp
import os
from pathlib import Path

import attrs
from twisted.internet.defer import Deferred, DeferredLock
from twisted.logger import Logger

from infranetes_common.concurrency import backoff, run_in_thread, shielded, sleep, start
from infranetes_common.errors import FailedPrecondition, InfranetesError, NotFound, Unavailable
from infranetes_common.reactors import IReactor
from infranetes_common.volume_disks import OPTIONS, TARGET
from vmserver.layers.disks import ScsiDisks
from vmserver.machine.mounts import Flag, mount, mounts, sync, unmount_unused
from vmserver.volumes import filesystems, making
from vmserver.volumes.disk_records import DiskMount, DiskRecords

APPEAR_SECONDS = 30.0
RESTORE_SECONDS = 5.0  # for a disk to appear, at each attempt to mount it again after a reboot
_RETRY_SECONDS = (0.5, 5.0)  # the first pause between two attempts, and the longest
_LOOK_SECONDS = (0.01, 0.1)  # the first pause between two looks for a disk, and the longest
DIRECTORY = "directory"
RAW = "raw"
_GROUP, _MODE = "disk", 0o660  # the group and mode of a disk's device

_log = Logger()


@attrs.frozen
class DiskSpace:
    """The space left on a mounted disk; an unmounted one has no known space. :ivar disk: its own size in
    bytes."""

    space: filesystems.Space
    disk: int


class PodDisks:
    """Mounts, finds, measures and unmounts disks, one at a time.

    :param base: a directory of mount points.
    """

    def __init__(self, reactor: IReactor, base: Path, disks: ScsiDisks) -> None:
        self._reactor = reactor
        self._base = base
        self._disks = disks
        self._records = DiskRecords(base)
        self._lock = DeferredLock()
        self._restoring: Deferred[None] | None = None

    async def restore(self) -> None:
        """Mount the disks that were mounted before a reboot of the VM; retry failures in the background."""
        disks = await run_in_thread(self._reactor, self._thd_records)
        left = await self._restored(disks)
        if left:
            self._restoring = start(self._restore(left))
            self._restoring.addErrback(lambda failure: None)

    def stop(self) -> None:
        """Stop retrying the mounts that `restore` could not make. Idempotent."""
        if self._restoring is not None:
            self._restoring.cancel()

    async def _restore(self, left: list[DiskMount]) -> None:
        for pause in backoff(*_RETRY_SECONDS):
            await sleep(self._reactor, pause)
            left = await self._restored(left)
            if not left:
                return

    async def _restored(self, disks: list[DiskMount]) -> list[DiskMount]:
        """Mount disks; return those that could not be mounted."""
        left = []
        for one in disks:
            try:
                await shielded(self._mount_again(one))
            except InfranetesError as error:
                left.append(one)
                _log.error("disk {serial} is not mounted again: {error}", serial=one.serial, error=error)
        return left

    async def _mount_again(self, disk: DiskMount) -> None:
        async with self._lock:
            # The disk may have been unmounted meanwhile.
            if disk in await run_in_thread(self._reactor, self._records.load):
                await self._mount(disk, RESTORE_SECONDS)
                _log.info("disk {serial} is mounted again", serial=disk.serial)

    def _thd_records(self) -> list[DiskMount]:
        """Return the records of disks to mount again, after removing their stale mount points."""
        found = [one for one in self._records.load() if not os.path.ismount(self._point(one.serial))]
        for one in found:
            _remove_mount_point(self._point(one.serial))
        return found

    async def mount(self, disk: DiskMount) -> None:
        """Mount a disk, with a file system made on it if it is blank. Idempotent.

        It goes on when this is cancelled: half a file system could be neither mounted nor made again.

        :raise Unavailable: it does not appear. :raise FailedPrecondition: it holds something else."""
        await shielded(self._mount_alone(disk))

    async def _mount_alone(self, disk: DiskMount) -> None:
        async with self._lock:
            await self._mount(disk, APPEAR_SECONDS)

    async def _mount(self, disk: DiskMount, within: float) -> None:
        point = self._point(disk.serial)
        if await run_in_thread(self._reactor, self._mark(disk.serial).exists):
            raise FailedPrecondition(
                f"disk {disk.serial} is a raw device of a container, so it can't be mounted as well"
            )
        device = await self._appeared(disk.serial, within)
        fills_disk = False
        if not await run_in_thread(self._reactor, os.path.ismount, point):
            fills_disk = await self._check_content(disk, device)
            await run_in_thread(self._reactor, self._records.save, disk)
            await run_in_thread(self._reactor, _thd_mount, disk, device, point)
        if disk.read_only:
            return
        if not fills_disk:
            await self._grow(device, disk.filesystem, point)
        if disk.group is not None:
            await run_in_thread(self._reactor, filesystems.give_to_group, str(point), disk.group)

    async def find(self, serial: str) -> str:
        """Wait for a disk that containers use as a device, and return the device. Until `unmount`, the disk
        can't be mounted. Idempotent.

        :raise Unavailable: it does not appear. :raise FailedPrecondition: it is mounted."""
        async with self._lock:
            if await run_in_thread(self._reactor, os.path.ismount, self._point(serial)):
                raise FailedPrecondition(
                    f"disk {serial} is mounted in this VM, so it can't be a device of a container"
                )
            device = await self._appeared(serial, APPEAR_SECONDS)
            await run_in_thread(self._reactor, self._thd_mark, serial)
            await run_in_thread(self._reactor, _thd_set_owner, device)
        return device

    async def sync(self, serial: str) -> None:
        """Flush pending writes to a disk, which stays mounted. Idempotent.

        :raise NotFound: it is neither mounted nor a container's. :raise Unavailable: it can't be written."""
        await run_in_thread(self._reactor, self._thd_sync, serial)

    async def unmount(self, serial: str) -> None:
        """Flush and unmount a disk, and remove it from the kernel. Idempotent.

        :raise FailedPrecondition: something uses it; pending writes were flushed."""
        await shielded(self._unmount(serial))

    async def _unmount(self, serial: str) -> None:
        async with self._lock:
            await run_in_thread(self._reactor, self._thd_unmount, serial)

    async def usage(self, serial: str, *, grow: bool) -> DiskSpace:
        """Measure a disk. :param grow: look whether it has grown, and fill it with its file system first.

        :raise NotFound: it is neither mounted nor a container's."""
        point = self._point(serial)
        if await run_in_thread(self._reactor, self._mark(serial).exists):
            async with self._lock:
                device = await self._appeared(serial, APPEAR_SECONDS)
                size = await run_in_thread(self._reactor, self._thd_size, device, grow)
            return DiskSpace(filesystems.Space(0, 0, 0, 0, 0), size)
        if not await run_in_thread(self._reactor, os.path.ismount, point):
            raise NotFound(f"disk {serial} is not mounted in this VM")
        async with self._lock:
            if grow:
                [found] = [one for one in mounts() if one.point == str(point)]
                await self._grow(await self._appeared(serial, APPEAR_SECONDS), found.kind, point)
            space = await run_in_thread(self._reactor, filesystems.space, str(point))
            size = await run_in_thread(
                self._reactor, filesystems.size_of, await self._appeared(serial, APPEAR_SECONDS)
            )
        return DiskSpace(space, size)

    def _point(self, serial: str) -> Path:
        return self._base / serial / DIRECTORY

    def _mark(self, serial: str) -> Path:
        return self._base / serial / RAW

    async def _appeared(self, serial: str, within: float) -> str:
        """Return the disk's device, once it is there. :raise Unavailable: it is not, in so many seconds."""
        until = self._reactor.seconds() + within
        pauses = backoff(*_LOOK_SECONDS)
        while True:
            device = await run_in_thread(self._reactor, self._thd_device, serial)
            if device is not None:
                return device
            if self._reactor.seconds() >= until:
                raise Unavailable(
                    f"no disk with the serial number {serial} has appeared in this VM; try again"
                )
            await sleep(self._reactor, next(pauses))

    async def _check_content(self, disk: DiskMount, device: str) -> bool:
        """Make a file system on a blank disk, or on one on which this was begun; `making` has the cases.
        Return whether one was made.

        :raise FailedPrecondition: it holds something other than such a file system."""
        if await run_in_thread(self._reactor, filesystems.begins_as, device, disk.filesystem):
            # Leave it to the kernel to find out whether the file system is whole: running a program takes
            # long.
            if not await run_in_thread(self._reactor, _is_half_made, disk, device):
                return False
            found, begun, blank = disk.filesystem, True, False
        else:
            # Don't run blkid on a disk that is all zeros: it would find nothing, and each program takes long.
            blank = await run_in_thread(self._reactor, filesystems.is_blank, device)
            found = "" if blank else await filesystems.found_on(self._reactor, device)
            begun = (
                not blank
                and not found
                and await run_in_thread(self._reactor, making.is_marked, device, disk.serial)
            )
        if not begun and not blank:
            raise FailedPrecondition(
                f"the volume holds {found or 'something that is no file system'} where {disk.filesystem} "
                "is asked for: it is not formatted. Ask for what it holds, or make it all zeros if nothing "
                "of it is needed"
            )
        if disk.read_only:
            raise FailedPrecondition("the volume is empty, and no file system can be made read-only")
        if not begun:
            await run_in_thread(self._reactor, making.mark, device, disk.serial)
        await filesystems.make(self._reactor, device, disk.filesystem, again=begun)
        await run_in_thread(self._reactor, making.unmark, device, disk.serial)
        return True

    async def _grow(self, device: str, filesystem: str, point: Path) -> None:
        number = os.stat(device).st_rdev
        await run_in_thread(self._reactor, self._disks.look_at_size, number)
        if await run_in_thread(self._reactor, filesystems.is_smaller, device, filesystem):
            await filesystems.grow(self._reactor, device, filesystem, str(point))

    def _thd_device(self, serial: str) -> str | None:
        raw = [mark.parent.name for mark in self._base.glob(f"*/{RAW}")]
        return self._disks.with_serial(TARGET, serial, raw)

    def _thd_size(self, device: str, look: bool) -> int:
        if look:
            self._disks.look_at_size(os.stat(device).st_rdev)
        return filesystems.size_of(device)

    def _thd_mark(self, serial: str) -> None:
        mark = self._mark(serial)
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark.touch(mode=0o600)

    def _thd_give_up(self, serial: str) -> None:
        """Flush a disk that containers wrote to, and remove it from the kernel."""
        device = self._thd_device(serial)
        if device is not None:
            filesystems.flush(device)
            self._disks.forget(os.stat(device).st_rdev)
        self._mark(serial).unlink(missing_ok=True)

    def _thd_sync(self, serial: str) -> None:
        point = self._point(serial)
        if self._mark(serial).exists():
            if (device := self._thd_device(serial)) is not None:
                filesystems.flush(device)
        elif os.path.ismount(point):
            sync(point)
        else:
            raise NotFound(f"disk {serial} is not mounted in this VM")

    def _thd_unmount(self, serial: str) -> None:
        if self._mark(serial).exists():
            self._thd_give_up(serial)
            return
        point = self._point(serial)
        self._records.remove(serial)
        if not os.path.ismount(point):
            _remove_mount_point(point)
            self._disks.forget_unmounted(TARGET, serial)
            return
        device = point.stat().st_dev
        sync(point)
        number = f"{os.major(device)}:{os.minor(device)}"
        # Parts of the disk may also be mounted for containers. Unmount the last mount first.
        points = [one.point for one in mounts() if one.device == number]
        if not all(unmount_unused(each) for each in reversed(points)):
            raise FailedPrecondition(
                f"disk {serial} is still used in this VM; what was written to it is on the disk"
            )
        _remove_mount_point(point)
        self._disks.forget(device)


def _is_half_made(disk: DiskMount, device: str) -> bool:
    return filesystems.is_unused(device, disk.filesystem) and making.is_marked(device, disk.serial)


def _thd_set_owner(device: str) -> None:
    """Give a disk to its group, as udev does some time after the disk has appeared."""
    with contextlib.suppress(KeyError):
        os.chown(device, 0, grp.getgrnam(_GROUP).gr_gid)
        os.chmod(device, _MODE)


def _thd_mount(disk: DiskMount, device: str, point: Path) -> None:
    flags = Flag.NO_DEVICES
    for option in disk.options:
        flags |= OPTIONS[option]
    if disk.read_only:
        flags |= Flag.READ_ONLY
    options = filesystems.options_of(disk.filesystem, disk.options)
    point.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        mount(device, str(point), disk.filesystem, Flag(flags), options)
    except InfranetesError:
        _remove_mount_point(point)
        raise


def _remove_mount_point(point: Path) -> None:
    """Remove the directory that a disk was mounted on, or was to be; one that is not empty stays."""
    with contextlib.suppress(FileNotFoundError):
        try:
            point.rmdir()
        except OSError as error:
            _log.error("{path} could not be removed: {error}", path=str(point), error=error.strerror)
