# SPDX-License-Identifier: Apache-2.0
"""The size of what containers wrote over their images, counted on the disk in the background.

Docker's own count walks the same files and locks the container meanwhile. Here one layer is walked at a time,
in a thread that is idle most of the time, and a request gets the last count.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes_common.concurrency import Notifier, run_in_thread, start, within
from infranetes_common.errors import DeadlineExceeded
from infranetes_common.reactors import IReactor
from infranetes_common.wire import vmserver as messages

AGE_SECONDS = 20.0  # until a layer is counted again
REST = 20.0  # or this many times as long as the count took, whichever is later
FIRST_SECONDS = 0.5  # the longest wait of a request for a layer's first count
WORK_SECONDS = 0.01  # of work, after which a walk pauses three times as long
MAX_ENTRIES = 1_000_000
MAX_SECONDS = 120.0
MAX_DEPTH = 100  # of nested directories; a walk has a descriptor open for each

_log = Logger()


@attrs.frozen
class _Count:
    message: messages.Written
    due: float  # when to count again


class WrittenLayers:
    """Counts the layers of containers, by container id."""

    def __init__(self, reactor: IReactor) -> None:
        self._reactor = reactor
        self._paths: dict[str, str] = {}
        self._counts: dict[str, _Count] = {}
        self._walking: Deferred[None] | None = None
        self._walked = Notifier()
        self._stop = threading.Event()

    async def of(self, paths: Mapping[str, str]) -> dict[str, messages.Written]:
        """Return the last count of each of these layers, as far as there is one, and forget all others.

        :param paths: the layers' directories by container id."""
        self._paths = dict(paths)
        for id in self._counts.keys() - paths.keys():
            del self._counts[id]
        if self._walking is None and self._next() is not None:
            self._walking = start(self._walk())
            self._walking.addErrback(_failed)
        if self._walking is not None and paths.keys() - self._counts.keys():
            with contextlib.suppress(DeadlineExceeded):
                await within(self._reactor, FIRST_SECONDS, self._walked.wait(), "counting what was written")
        return {id: self._counts[id].message for id in paths if id in self._counts}

    def stop(self) -> None:
        """End the current walk. Idempotent."""
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
                began = self._reactor.seconds()
                size, inodes = await run_in_thread(self._reactor, _thd_count, self._paths[id], self._stop)
                now = self._reactor.seconds()
                if id in self._paths:
                    written = messages.Written(time_nanos=time.time_ns(), bytes=size, inodes=inodes)
                    self._counts[id] = _Count(written, now + max(AGE_SECONDS, REST * (now - began)))
        finally:
            self._walking = None
            self._walked.notify()


def _failed(failure: Failure) -> None:
    if not failure.check(CancelledError):
        _log.failure("counting what containers wrote failed", failure=failure)


def _thd_count(top: str, stop: threading.Event) -> tuple[int, int]:
    """Count the bytes on the disk and the inodes below `top`, up to the bounds above."""
    size = inodes = 0
    linked: set[tuple[int, int]] = set()
    device: int | None = None  # the layer's; file systems mounted below it are not counted
    began = worked = time.monotonic()
    depth = top.count("/") + MAX_DEPTH
    for root, directories, files, descriptor in _tree(top):
        device = os.fstat(descriptor).st_dev if device is None else device
        elsewhere: set[str] = set()
        for name in (*directories, *files):
            try:
                found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            except OSError:
                continue
            if found.st_dev != device:
                elsewhere.add(name)
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
        directories[:] = [each for each in directories if each not in elsewhere]
        if root.count("/") >= depth:
            directories.clear()
    return size, inodes


def _tree(top: str) -> Iterator[tuple[str, list[str], list[str], int]]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # the layer was removed meanwhile
        yield from os.fwalk(top)
