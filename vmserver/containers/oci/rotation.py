# SPDX-License-Identifier: Apache-2.0
"""The rotation of containers' logs on the VM's disk. For the files see `vmserver.containers.oci.log`.

A full log is renamed, and conmon, which keeps writing to it, is told to make a new one: no line is lost.
If the agent ends between the two, the newest file is missing, and the next agent notices that.
"""

from __future__ import annotations

from pathlib import Path

import attrs
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from infranetes_common.concurrency import run_in_thread, sleep, start
from infranetes_common.errors import InfranetesError
from infranetes_common.reactors import IReactor
from vmserver.containers.oci.backlog import MOST_BYTES, Backlog
from vmserver.containers.oci.control import Control
from vmserver.containers.oci.log import numbers, renamed

MAX_BYTES = 64 * 1024 * 1024  # of a file, before it is renamed
KEPT = 3  # files of a log, including the newest
PAUSES = (0.05, 0.5)  # between two checks: if a log grows fast, and otherwise
MISSING_SECONDS = 5.0  # until conmon is told once more to create the newest file
_FAST = 16  # a log grows fast if it grows by this fraction of its limit between two checks

_log = Logger()


@attrs.define
class _Watched:
    log: Path
    control: Control
    backlog: Backlog | None
    size: int = 0
    missing: float = 0.0  # since when its newest file is missing; 0: it is not


class Rotation:
    """Renames the logs that are full, and deletes the oldest files in threads: large ones take long.

    :param max_bytes: see `MAX_BYTES`. :param kept: see `KEPT`.
    """

    def __init__(self, reactor: IReactor, max_bytes: int = MAX_BYTES, kept: int = KEPT) -> None:
        self._reactor = reactor
        self._max_bytes = max_bytes
        self._kept = kept
        self._watched: dict[str, _Watched] = {}
        self._looking: Deferred[None] | None = None

    @property
    def unread(self) -> int:
        """The most bytes of a log that may be unread before its container is held back."""
        return min(MOST_BYTES, self._max_bytes * self._kept // 2)

    def add(self, id: str, log: Path, control: Control, backlog: Backlog | None = None) -> None:
        """Look after a running container's log. :param backlog: what holds the container back, if need be."""
        self._watched[id] = _Watched(log, control, backlog)
        if self._looking is None:
            self._looking = start(self._look())

    def remove(self, id: str) -> None:
        """Leave a log as it is: its container has ended. Idempotent."""
        watched = self._watched.pop(id, None)
        if watched is not None and watched.backlog is not None:
            watched.backlog.release()

    def close(self) -> None:
        """Stop looking. Idempotent."""
        for id in list(self._watched):
            self.remove(id)
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.addErrback(lambda _: None)
            looking.cancel()

    async def _look(self) -> None:
        while self._watched:
            fast = False
            for id, watched in list(self._watched.items()):
                if id not in self._watched:  # removed meanwhile
                    continue
                try:
                    fast = await self._check(id, watched) or fast
                except (OSError, InfranetesError) as error:
                    if self._watched.get(id) is watched:  # otherwise it may have been deleted meanwhile
                        _log.warn("the log of container {id} is not rotated: {error}", id=id, error=error)
            await sleep(self._reactor, PAUSES[0] if fast else PAUSES[1])
        self._looking = None

    async def _check(self, id: str, watched: _Watched) -> bool:
        """Rename a log that is full, or hold its container back; return whether to look again soon."""
        log = watched.log
        try:
            size = log.stat().st_size
        except FileNotFoundError:
            if watched.backlog is None or not watched.backlog.check(log, 0):
                await self._missing(watched)
            return True
        watched.missing = 0.0
        if watched.backlog is not None and watched.backlog.check(log, size):
            return True  # a stopped conmon makes no new file
        grown, watched.size = size - watched.size, size
        if size >= self._max_bytes:
            known = numbers(log)
            log.rename(renamed(log, (known[-1] if known else 0) + 1))
            watched.size = 0
            await watched.control.reopen_log(log)
            if id in self._watched:
                needed = None if watched.backlog is None else watched.backlog.needed()
                await run_in_thread(self._reactor, _thd_delete_old, log, self._kept - 1, needed)
            return True
        return grown > self._max_bytes // _FAST

    async def _missing(self, watched: _Watched) -> None:
        """Ask for the newest file again if it stays missing. An earlier message may still be on its way."""
        now = self._reactor.seconds()
        if not watched.missing:
            watched.missing = now
        elif now - watched.missing > MISSING_SECONDS and numbers(watched.log):
            watched.missing = now
            await watched.control.reopen_log(watched.log)


def _thd_delete_old(log: Path, kept: int, needed: int | None) -> None:
    """Delete the renamed files of a log but the newest `kept` ones, and those from `needed` on."""
    for number in numbers(log)[: -kept or None]:
        if needed is None or number < needed:
            renamed(log, number).unlink(missing_ok=True)
