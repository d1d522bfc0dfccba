# SPDX-License-Identifier: Apache-2.0
"""Volumes that are roots of VMs that boot images: each is filled with an image's disk once, and then stays.

What is known of a root is in `ID.root` beside the volume, never on the disk itself, which is its guest's:

ID.root                the volume       what becomes of it
none                   all zeros        it is filled
none                   anything else    it is refused, or filled if it may be replaced
being filled           part of a disk   it is filled anew, whatever image that was: a daemon was killed
filled, this image     a root           it is taken as it is
filled, another image  a root           it is refused, or filled if it may be replaced

A volume is locked while it is filled, and qemu-img, which does that, inherits the lock: no VM gets it, no
daemon fills it and nobody deletes it until both have let go of it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import attrs
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.logger import Logger

from infranetes.images.machine.limits import DiskLimits
from infranetes.images.machine.orders import Order
from infranetes.providers.machine_images import BaseDisk, BootDisk, DiskFormat
from infranetes.providers.qemu.volumes import sparse_files
from infranetes.providers.qemu.volumes.files import MODE, RootRecord, VolumeFiles, as_error
from infranetes.providers.qemu.volumes.opened import open_volume
from infranetes.providers.volumes import ROOT_SERIAL
from infranetes_common.commands import Command, Running, find_program
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.reactors import IReactor

FILL_SECONDS = 1800.0
_CHUNK = 4 << 20
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}  # each further arena counts as 64 MiB of address space
_MIB = 1 << 20
_log = Logger()


class Roots:
    """Makes volumes roots. :param qemu_img: the program."""

    def __init__(self, reactor: IReactor, files: VolumeFiles, qemu_img: str) -> None:
        self._reactor = reactor
        self._files = files
        self._qemu_img = qemu_img
        self._running: set[Running] = set()

    async def root(self, volume_id: str, base: BaseDisk, replace: bool) -> BootDisk:
        """See `IKeepsRoots.root`. Cancelling it ends the filling, which the next call begins anew."""
        filling = _Filling(self._files, volume_id, base, replace)
        try:
            if await run_in_thread(self._reactor, filling.thd_begin, on_cancel=filling.stop.set):
                await self._fill(filling)
        except OSError as error:
            raise as_error(error, f"volume {volume_id} can't be made a root") from None
        finally:
            await run_in_thread(self._reactor, filling.thd_close)
        return BootDisk(ROOT_SERIAL, self._files.path(volume_id), DiskFormat.RAW, volume=volume_id)

    async def stop(self) -> None:
        """End what is being filled."""
        for running in list(self._running):
            await running.stop()

    async def _fill(self, filling: _Filling) -> None:
        began = self._reactor.seconds()
        if filling.base.format is not DiskFormat.ISO:  # which is booted, and installs onto the root
            await self._copy(filling)
        await run_in_thread(self._reactor, filling.thd_finish)
        _log.info(
            "volume {volume} is a root made of image {digest}: {seconds:.2f} s",
            volume=filling.volume_id,
            digest=filling.base.digest,
            seconds=self._reactor.seconds() - began,
        )

    async def _copy(self, filling: _Filling) -> None:
        program = find_program(self._qemu_img, "install Debian's qemu-utils")
        size = await run_in_thread(self._reactor, filling.thd_empty)
        with _opened_base(filling.base) as source:
            inherited = [source, filling.descriptor]
            limits = DiskLimits(virtual_bytes=size, seconds=FILL_SECONDS)
            order = Order(os.getpid(), limits, target=filling.descriptor)
            words = [sys.executable, "-I", "-m", "infranetes.images.machine.worker"]
            words += [json.dumps(attrs.asdict(order)), program, "convert", "-q", "-n", "--target-is-zero"]
            words += ["--image-opts", _image(filling.base.format, source)]
            words += ["--target-image-opts", _image(DiskFormat.RAW, filling.descriptor)]
            running = Running(
                self._reactor, Command(words, None, inherited=inherited, environment=_ENVIRONMENT)
            )
        self._running.add(running)
        try:
            output = await running.ended.wait().addTimeout(FILL_SECONDS, self._reactor)
        except DeferredTimeout:
            raise DeadlineExceeded(
                f"volume {filling.volume_id} could not be filled from its image within {FILL_SECONDS:g} s; "
                "the next attempt fills it anew"
            ) from None
        finally:
            self._running.discard(running)
            await running.stop()
        if output.code < 0:
            raise Unavailable(f"qemu-img, which filled volume {filling.volume_id}, {output.how}; try again")
        if output.code and os.strerror(errno.ENOSPC) in output.message():
            raise ResourceExhausted(
                f"{filling.directory} has no room for what volume {filling.volume_id} is filled with: make "
                "room; the next attempt fills it anew"
            )
        if output.code:
            raise InfranetesError(
                f"volume {filling.volume_id} can't be filled from its image: qemu-img {output.how}: "
                f"{output.message()}"
            )


class _Filling:
    """One volume that is looked at, and filled. Methods named thd_ block.

    :ivar stop: set once nobody wants it any more. :ivar descriptor: the volume's, which holds its lock.
    :ivar directory: of the volumes."""

    def __init__(self, files: VolumeFiles, volume_id: str, base: BaseDisk, replace: bool) -> None:
        self.volume_id = volume_id
        self.base = base
        self.stop = Event()
        self.descriptor = -1
        self._files = files
        self._replace = replace
        self.directory = files.directory
        self._path = Path()
        self._size = 0

    def thd_begin(self) -> bool:
        """Lock the volume and look at it. Return whether it has to be filled, which is then recorded.

        :raise InfranetesError: it can't be the root."""
        disk = self._files.get(self.volume_id)
        path = self._files.path(self.volume_id)
        if path.is_symlink() or not path.is_file():
            raise FailedPrecondition(
                f"volume {self.volume_id} is a device of the node, which can't be a root: take a volume that "
                "Infranetes has made (a PersistentVolumeClaim of volumeMode: Block)"
            )
        self._path = path
        self.descriptor = open_volume(self.volume_id, path, False).descriptor
        self._size = os.fstat(self.descriptor).st_size
        if self.base.format is not DiskFormat.ISO and self._size < self.base.virtual_size:
            raise FailedPrecondition(
                f"volume {self.volume_id} has {self._size // _MIB} MiB, and the image's disk has "
                f"{-(-self.base.virtual_size // _MIB)} MiB: enlarge the volume, or ask for a larger one"
            )
        if not self._needed(self._files.root(disk.id)):
            return False
        self._files.put_root(self.volume_id, RootRecord(self.base.digest, whole=False))
        return True

    def _needed(self, record: RootRecord | None) -> bool:
        if record is not None and record.whole and record.digest == self.base.digest:
            return False
        if self._replace or (record is not None and not record.whole):
            return True
        remedy = (
            "what is on it would be lost. The annotation infranetes.io/root: replace has that done; or take "
        )
        if record is not None:
            raise FailedPrecondition(
                f"volume {self.volume_id} is a root made of another image ({record.digest}, and this one is "
                f"{self.base.digest}): {remedy}that image"
            )
        if self._has_data():
            raise FailedPrecondition(
                f"volume {self.volume_id} is not empty, and no root that was made of an image: {remedy}"
                "another volume"
            )
        return True

    def _has_data(self) -> bool:
        with _opened(self._path, os.O_RDONLY) as descriptor:
            for start, end in sparse_files.data(descriptor, self._size):
                while start < end:
                    if self.stop.is_set():
                        raise Unavailable(f"nobody waits for volume {self.volume_id} any more")
                    found = os.pread(descriptor, min(_CHUNK, end - start), start)
                    if found.strip(b"\0"):
                        return True
                    if not found:
                        break
                    start += len(found)
        return False

    def thd_empty(self) -> int:
        """Make the volume all zeros. Return its size in bytes."""
        with _opened(self._path, os.O_RDWR) as descriptor:
            os.ftruncate(descriptor, 0)
            os.ftruncate(descriptor, self._size)
        return self._size

    def thd_finish(self) -> None:
        """Record that the volume is whole, once it is on the disk."""
        os.fsync(self.descriptor)
        self._files.put_root(self.volume_id, RootRecord(self.base.digest, whole=True))

    def thd_close(self) -> None:
        """Let go of the volume, which is root's alone again."""
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):
                os.fchown(self.descriptor, os.getuid(), os.getgid())
                os.fchmod(self.descriptor, MODE)
            os.close(self.descriptor)
            self.descriptor = -1


def _image(format: DiskFormat, descriptor: int) -> str:
    file = f"file.driver=file,file.filename=/proc/self/fd/{descriptor},file.locking=off"
    return f"driver={format.value},{file}"


@contextlib.contextmanager
def _opened_base(base: BaseDisk) -> Iterator[int]:
    with contextlib.ExitStack() as opened:
        try:
            descriptor = opened.enter_context(_opened(base.path, os.O_RDONLY | os.O_NONBLOCK))
        except OSError as error:
            raise FailedPrecondition(
                f"the image's disk {base.path} can't be opened: {error.strerror}; pull the image again"
            ) from error
        yield descriptor


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
