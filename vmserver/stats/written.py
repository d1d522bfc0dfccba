"""How much containers wrote over their images: their layers counted on the disk, slowly and now and then.

Docker's own count walks the same files and holds its container meanwhile. Here one layer is walked at a
time, in a thread that rests most of the time; whoever asks gets the last count.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger

from infranetes_common import vmserver as messages

AGE_SECONDS = 20.0  # a count younger than this is not made again
REST = 20.0  # nor one that took a twentieth of its age or more
FIRST_SECONDS = 0.5  # how long one who asks first waits for it
WORK_SECONDS = 0.01  # a walk rests after each of these, three times as long
MAX_ENTRIES = 1_000_000
MAX_SECONDS = 120.0
MAX_DEPTH = 100  # directories below each other; each is an open file while it is walked

_log = Logger()


@attrs.frozen
class _Count:
    message: Any  # vmserver.Written
    due: float  # when it is to be made again


class WrittenLayers:
    """Counts by container id."""

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor
        self._paths: dict[str, str] = {}
        self._counts: dict[str, _Count] = {}
        self._walking: Deferred[None] | None = None
        self._waiting: list[Deferred[None]] = []
        self._stop = threading.Event()

    async def of(self, paths: Mapping[str, str]) -> dict[str, Any]:
        """The last Written of each of these layers (directories by container id) that there is. All others
        are forgotten."""
        self._paths = dict(paths)
        for id in self._counts.keys() - paths.keys():
            del self._counts[id]
        if self._walking is None and self._next() is not None:
            self._walking = Deferred.fromCoroutine(self._walk())
            self._walking.addErrback(_fell)
        if self._walking is not None and paths.keys() - self._counts.keys():
            await self._a_moment()
        return {id: self._counts[id].message for id in paths if id in self._counts}

    def stop(self) -> None:
        """End the walk that is under way. Twice is once."""
        self._stop.set()
        self._paths = {}

    def _next(self) -> str | None:
        now = self._reactor.seconds()
        for id in self._paths:
            count = self._counts.get(id)
            if count is None or count.due <= now:
                return id
        return None

    async def _walk(self) -> None:
        try:
            while not self._stop.is_set() and (id := self._next()) is not None:
                pool = self._reactor.getThreadPool()
                began = self._reactor.seconds()
                size, inodes = await deferToThreadPool(
                    self._reactor, pool, _thd_count, self._paths[id], self._stop
                )
                now = self._reactor.seconds()
                if id in self._paths:
                    written = messages.Written(time_nanos=time.time_ns(), bytes=size, inodes=inodes)
                    self._counts[id] = _Count(written, now + max(AGE_SECONDS, REST * (now - began)))
        finally:
            self._walking = None
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                one.callback(None)

    async def _a_moment(self) -> None:
        one: Deferred[None] = Deferred(lambda deferred: self._waiting.remove(deferred))
        self._waiting.append(one)
        timer = self._reactor.callLater(FIRST_SECONDS, one.cancel)
        with contextlib.suppress(CancelledError):
            try:
                await one
            finally:
                if timer.active():
                    timer.cancel()


def _fell(failure: Any) -> None:
    if not failure.check(CancelledError):
        _log.failure("counting what containers wrote failed", failure=failure)


def _thd_count(top: str, stop: threading.Event) -> tuple[int, int]:
    """Bytes on the disk and inodes below `top`. Beyond the bounds, of what was counted until then."""
    size = inodes = 0
    linked: set[tuple[int, int]] = set()
    began = worked = time.monotonic()
    depth = top.count("/") + MAX_DEPTH
    for root, directories, files, descriptor in _tree(top):
        for name in (*directories, *files):
            try:
                found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            except OSError:
                continue
            if found.st_nlink > 1 and name in files:
                if (found.st_dev, found.st_ino) in linked:
                    continue
                linked.add((found.st_dev, found.st_ino))
            size += found.st_blocks * 512
            inodes += 1
            if inodes % 64 == 0 and (now := time.monotonic()) - worked > WORK_SECONDS:
                if stop.wait(3 * (now - worked)) or inodes > MAX_ENTRIES or now - began > MAX_SECONDS:
                    return size, inodes
                worked = time.monotonic()
        if root.count("/") >= depth:
            directories.clear()
    return size, inodes


def _tree(top: str) -> Iterator[tuple[str, list[str], list[str], int]]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # removed just now
        yield from os.fwalk(top)
