# SPDX-License-Identifier: Apache-2.0
"""Copies of volumes and snapshots, each to a file that is not there yet.

of a volume                        how it is copied              room that is kept meanwhile
file system that shares blocks     its blocks are shared         what the volume has by now
other file system, no VM has it    data is read, the file locked what the volume has by now
other file system, a VM has it     QEMU copies it                the volume's whole size

A copy gives way: attaching, detaching, enlarging or deleting a volume ends the copying of it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from threading import Event

from twisted.internet.defer import CancelledError, DeferredLock, DeferredSemaphore

from infranetes.providers.qemu.volumes import sparse_files
from infranetes.providers.qemu.volumes.attached import VolumeAttacher
from infranetes.providers.qemu.volumes.files import MODE, VolumeFiles, as_error
from infranetes_common.concurrency import Flight, Work, run_in_thread, settled
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import IReactor

_AT_ONCE = 2  # how many copies that read all data run at a time


class Copies:
    """Makes copies. :param lock: held while room is being reserved."""

    def __init__(
        self, reactor: IReactor, files: VolumeFiles, attacher: VolumeAttacher, lock: DeferredLock
    ) -> None:
        self._reactor = reactor
        self._files = files
        self._attacher = attacher
        self._lock = lock
        self._places = DeferredSemaphore(_AT_ONCE)
        self._running: dict[Flight[float], str] = {}  # the volume that each copies; "": none
        self._ending: set[Flight[float]] = set()
        self._wanted: Counter[str] = Counter()

    async def of_volume(self, volume_id: str, source: Path, target: Path) -> float:
        """Copy a volume, whether a VM has it or not. Return the time of the copy's content. Room is kept for
        the target until the caller releases it.

        :raise Unavailable: something had to be done with the volume, or its VM has ended; try again.
        :raise ResourceExhausted: there is no room."""
        if self._wanted[volume_id]:
            raise _gave_way(f"volume {volume_id}")
        return await self._run(volume_id, self._copy_volume(volume_id, source, target))

    async def of_snapshot(self, source: Path, target: Path) -> None:
        """Copy a snapshot's file. :raise Unavailable: the daemon is stopping."""
        await self._run("", self._copy_snapshot(source, target))

    @asynccontextmanager
    async def none_of(self, volume_id: str) -> AsyncIterator[None]:
        """End the copying of a volume, and let none begin during the block."""
        self._wanted[volume_id] += 1
        try:
            await self._end([flight for flight, of in self._running.items() if of == volume_id])
            yield
        finally:
            self._wanted -= Counter((volume_id,))  # which drops what is down to zero

    async def stop(self) -> None:
        """End all copies."""
        await self._end(list(self._running))

    async def _end(self, flights: Iterable[Flight[float]]) -> None:
        flights = list(flights)
        for flight in flights:
            if flight not in self._ending:  # cancelling it twice would cancel the cleanup
                self._ending.add(flight)
                flight.cancel()
        await settled([flight.join() for flight in flights])

    async def _run(self, volume_id: str, work: Work[float]) -> float:
        flight = Flight(work)
        self._running[flight] = volume_id
        try:
            return await flight.join()
        except CancelledError:
            raise _gave_way(f"volume {volume_id}" if volume_id else "a snapshot") from None
        finally:
            self._running.pop(flight, None)
            self._ending.discard(flight)

    async def _copy_volume(self, volume_id: str, source: Path, target: Path) -> float:
        try:
            found = await run_in_thread(self._reactor, os.lstat, source)
            await self._keep(target, found.st_blocks * 512)
            instant = await run_in_thread(self._reactor, _thd_clone, source, target)
            if instant is not None:
                return instant
            async with self._places:
                instant = await self._copy_data(source, target, True)
                if instant is None:
                    await self._keep(target, found.st_size)
                    instant = await self._mirror(volume_id, target, found.st_size)
                return instant
        except OSError as error:
            raise as_error(error, f"volume {volume_id} can't be copied to {target}") from None

    async def _copy_snapshot(self, source: Path, target: Path) -> float:
        try:
            instant = await run_in_thread(self._reactor, _thd_clone, source, target)
            if instant is None:
                async with self._places:
                    instant = await self._copy_data(source, target, False)
            assert instant is not None
            return instant
        except OSError as error:
            raise as_error(error, f"{source} can't be copied to {target}") from None

    async def _copy_data(self, source: Path, target: Path, locked: bool) -> float | None:
        stop = Event()
        return await run_in_thread(self._reactor, _thd_copy, source, target, locked, stop, on_cancel=stop.set)

    async def _mirror(self, volume_id: str, target: Path, size: int) -> float:
        descriptor = await run_in_thread(self._reactor, _thd_resized, target, size)
        try:
            instant = await self._attacher.mirror(volume_id, descriptor)
            await run_in_thread(self._reactor, os.fsync, descriptor)
        finally:
            os.close(descriptor)
        return instant

    async def _keep(self, target: Path, size: int) -> None:
        async with self._lock:
            await run_in_thread(self._reactor, self._files.keep, target, size)


def _gave_way(what: str) -> Unavailable:
    return Unavailable(
        f"the copying of {what} was ended: it is being attached, detached, enlarged or deleted, or the "
        "daemon stops. Try again"
    )


def _thd_clone(source: Path, target: Path) -> float | None:
    """Make a new file share the blocks of another. Return the time of its content; None: the file system
    can't."""
    with _opened(source, os.O_RDONLY) as old, _opened(target, os.O_RDWR | os.O_CREAT | os.O_EXCL) as new:
        instant = time.time()
        if not sparse_files.clone(old, new):
            return None
        os.fsync(new)
    return instant


def _thd_copy(source: Path, target: Path, locked: bool, stop: Event) -> float | None:
    """Copy what a file holds to an empty one. Return the time of its content.

    :param locked: whether only if no VM can write to it; None: one can."""
    with _opened(source, os.O_RDONLY) as old, _opened(target, os.O_RDWR) as new:
        if locked:
            try:
                fcntl.flock(old, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
        instant = time.time()
        sparse_files.copy(old, new, stop)
        os.fsync(new)
    return instant


def _thd_resized(path: Path, size: int) -> int:
    """Open a file and make it `size` bytes large."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, MODE)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
