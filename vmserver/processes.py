"""Processes of this machine: their families, and their ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.internet.interfaces import IReadDescriptor
from zope.interface import implementer


def kill_family(leader: int) -> None:
    """SIGKILL a process, its descendants, and every process of the session that it leads."""
    parents: dict[int, int] = {}
    doomed = {leader}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
            if int(fields[3]) == leader:
                doomed.add(int(entry.name))
    while more := {pid for pid, parent in parents.items() if parent in doomed} - doomed:
        doomed |= more
    for pid in doomed - {0, 1, os.getpid()}:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def start_ticks(pid: int) -> int:
    """When a process began, in clock ticks since boot: with the pid, its name for ever. 0: there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


@implementer(IReadDescriptor)
class ProcessEnd:
    """Calls `ended` in the reactor's thread once a process, anybody's child, is no more.

    :raise ProcessLookupError: it is no more already.
    """

    def __init__(self, reactor: Any, pid: int, ended: Callable[[], None]) -> None:
        self._reactor = reactor
        self._ended = ended
        self._fd = os.pidfd_open(pid)
        reactor.addReader(self)

    def fileno(self) -> int:
        return self._fd

    def logPrefix(self) -> str:
        return "process"

    def doRead(self) -> None:
        self.close()
        self._ended()

    def connectionLost(self, reason: Any) -> None:
        self.close()

    def close(self) -> None:
        """Wait no more. Twice is once."""
        if self._fd >= 0:
            self._reactor.removeReader(self)
            os.close(self._fd)
            self._fd = -1
