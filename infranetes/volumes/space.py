# SPDX-License-Identifier: Apache-2.0
"""Showing kubelet the disk usage of emptyDirs that only their VMs have.

kubelet adds up the blocks of what it finds in the node's directory: for its stats, and to evict pods whose
emptyDirs exceed their sizeLimit, or that exceed their limit of ephemeral storage. It asks nobody for another
figure, and tells nobody the limit. So there is a file with as many blocks in the directory. Nothing is
written to it, but its blocks are taken: the node's disk is as full as if the pod ran on the node. It gives
way before the disk is so full that kubelet would evict others.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.pods.node.inventory import Sandbox
from infranetes.volumes.mounts import Source
from infranetes_common.concurrency import Lanes, sleep, start
from infranetes_common.errors import InfranetesError
from infranetes_common.filesync.manifest import TEMPORARY
from infranetes_common.paths import open_path
from infranetes_common.reactors import IReactor

INTERVAL = 10.0  # seconds between two looks; kubelet looks every minute
STEP = 1024 * 1024  # bytes; smaller sizes and changes are not shown
NAME = TEMPORARY + b"in-vm"  # files of this prefix are never carried
SECONDS = 20.0  # the longest that changing the file may take

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate64.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_log = Logger()

ListSources = Callable[[], Mapping[str, Source]]


class ShownSpace:
    """Keeps each file that stands for a sandbox's volume as large as the volume's use in its VM.

    :param lanes: threads for work in directories of the node. :param on: false: there are no such files.
    :param free: the share of the node's file system that has to stay free.
    """

    def __init__(self, reactor: IReactor, lanes: Lanes, *, on: bool, free: float) -> None:
        self._reactor = reactor
        self._lanes = lanes
        self._on = on
        self._free = free
        self._loops: dict[str, Deferred[None]] = {}  # by sandbox
        self._troubles: dict[str, str] = {}  # by path

    def show(self, sandbox: Sandbox, list_sources: ListSources) -> None:
        """Show the usage of a sandbox's volumes, until `forget`. Idempotent.

        :param list_sources: returns their sources by their ids."""
        if self._on and sandbox.id not in self._loops:
            self._loops[sandbox.id] = start(self._run(sandbox, list_sources)).addErrback(
                _log_unless_cancelled
            )

    def forget(self, sandbox_id: str) -> None:
        """Stop looking at a sandbox's volumes. Idempotent."""
        loop = self._loops.pop(sandbox_id, None)
        if loop is not None:
            loop.cancel()

    def clear(self, sources: Iterable[Source]) -> None:
        """Show that these take nothing any more. The next time that is done by whoever removes the pod."""
        for source in sources:
            self._troubles.pop(source.path, None)
            if self._on:
                self._lanes.later(source.path, partial(_thd_clear, source.path))

    def stop(self) -> None:
        """Stop looking at any volumes."""
        for sandbox_id in list(self._loops):
            self.forget(sandbox_id)

    async def _run(self, sandbox: Sandbox, list_sources: ListSources) -> None:
        while True:
            await sleep(self._reactor, INTERVAL)
            agent, sources = sandbox.client, list_sources()
            if agent is None or sandbox.watch is None or not sandbox.watch.live or not sources:
                continue
            try:
                taken = await agent.measure_volumes(list(sources))
            except InfranetesError as error:
                _log.debug("volumes of {sandbox} are not measured: {error}", sandbox=sandbox.id, error=error)
                continue
            for id, size in taken.items():
                await self._show_one(sources[id].path, size)

    async def _show_one(self, path: str, size: int) -> None:
        try:
            trouble = await self._lanes.run(path, SECONDS, thd_show, path, size, self._free)
        except (InfranetesError, OSError) as error:
            trouble = str(error)
        if trouble and trouble != self._troubles.get(path):
            _log.warn("the space that {path} takes in its VM is not shown to kubelet: {trouble}",
                      path=path, trouble=trouble)  # fmt: skip
        self._troubles[path] = trouble


def thd_show(path: str, size: int, free: float) -> str:
    """Have a file of that many bytes in a directory, which may be gone. Return why it is smaller, or "".

    :raise OSError: there can be none."""
    try:
        directory = open_path(os.fsencode(path), _DIRECTORY)
    except FileNotFoundError:
        return ""
    try:
        return _show(directory, size, free)
    finally:
        os.close(directory)


def _show(directory: int, size: int, free: float) -> str:
    if size < STEP:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(NAME, dir_fd=directory)
        return ""
    try:
        file = os.open(NAME, _FILE, dir_fd=directory)
    except FileNotFoundError:
        file = os.open(NAME, _FILE | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid != os.geteuid():
            raise OSError(errno.EEXIST, f"{os.fsdecode(NAME)} there belongs to somebody else")
        shown = found.st_blocks * 512
        disk = os.fstatvfs(file)
        room = int((disk.f_bavail - free * disk.f_blocks) * disk.f_frsize)
        fits = min(size, max(shown + room, 0))
        if abs(fits - shown) >= STEP:
            _resize(file, shown, fits)
        return "" if fits == size else f"the node's disk has to keep {free:.0%} free (volumes.keep_free)"
    finally:
        os.close(file)


def _resize(file: int, shown: int, size: int) -> None:
    if size > shown and _libc.fallocate64(file, 0, 0, size) < 0:
        number = ctypes.get_errno()
        os.ftruncate(file, shown)
        raise OSError(number, os.strerror(number))
    os.ftruncate(file, size)


def _thd_clear(path: str) -> None:
    with contextlib.suppress(OSError):  # kubelet has removed it
        thd_show(path, 0, 0.0)


def _log_unless_cancelled(failure: Failure) -> None:
    if not failure.check(CancelledError):
        _log.failure("showing the space that volumes take in their VMs failed", failure)
