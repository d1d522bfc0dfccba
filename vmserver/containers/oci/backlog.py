# SPDX-License-Identifier: Apache-2.0
"""Holds back a container that writes faster than the node reads its log.

conmon reads the container's pipes and writes the log on the VM's disk, so nothing slows the container by
itself. So conmon is stopped (SIGSTOP) while too much is unread: the pipes fill, and the container waits when
it writes. Nothing is held back for a reader that does not come back, nor where nobody has read: then the
oldest files are deleted when the log is full, and its reader says so.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

from twisted.internet.interfaces import IReactorTime

from infranetes_common.processes import process_state, start_ticks
from vmserver.containers.oci.conmon import Process
from vmserver.containers.oci.log import Cursor, numbers, renamed

MOST_BYTES = 16 * 1024 * 1024  # unread, before the container is held back; it goes on at half of that
LAG_BYTES = 4 * 1024 * 1024  # more than the node reads again after its daemon was killed
PATIENCE_SECONDS = 300.0  # the longest that it is held back while its log is not read


class Backlog:
    """What is unread of one container's log.

    :param position: returns how far its log was read; None: nobody has.
    """

    def __init__(
        self,
        clock: IReactorTime,
        process: Process,
        position: Callable[[], Cursor | None],
        most: int = MOST_BYTES,
    ) -> None:
        self._clock = clock
        self._process = process
        self._position = position
        self._most = most
        self._seen: tuple[Cursor | None, int] = (None, 0)
        self._advanced_at = 0.0
        self._held = False
        self._signal(signal.SIGCONT)  # an agent that was killed may have left it stopped

    def check(self, log: Path, size: int) -> bool:
        """Hold the container back or let it go on; return whether it is held back.

        :param size: of the newest file."""
        position, now = self._position(), self._clock.seconds()
        if position != self._seen[0]:
            self._advanced_at = now
        elif not self._held and size == self._seen[1]:
            return False
        self._seen = (position, size)
        holds = (
            position is not None
            and self._patient()
            and unread(log, position, size) > (self._most // 2 if self._held else self._most)
            and self._runs()
        )
        if holds != self._held:
            self._held = holds
            self._signal(signal.SIGSTOP if holds else signal.SIGCONT)
        return holds

    def needed(self) -> int | None:
        """Return the number of the oldest file that is still to be read; None: none has to be kept."""
        position = self._position()
        if position is None or not self._patient():
            return None
        return position.number - (position.offset < LAG_BYTES)

    def _patient(self) -> bool:
        return self._clock.seconds() - self._advanced_at < PATIENCE_SECONDS

    def _runs(self) -> bool:
        """Return whether the container's first process runs. Its end is for conmon to see."""
        state, ticks = process_state(self._process.pid)
        return ticks == self._process.ticks and state not in ("Z", "X")

    def release(self) -> None:
        """Let the container go on. Idempotent."""
        if self._held:
            self._held = False
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if start_ticks(self._process.conmon) == self._process.conmon_ticks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.conmon, number)


def unread(log: Path, position: Cursor, size: int) -> int:
    """Return how many bytes of a log come after `position`. :param size: of the newest file."""
    older = numbers(log)
    newest = (older[-1] if older else 0) + 1
    sizes = {newest: size}
    for number in older:
        if number >= position.number:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                sizes[number] = renamed(log, number).stat().st_size
    read = position.offset if position.number in sizes else 0
    return sum(sizes.values()) - read
