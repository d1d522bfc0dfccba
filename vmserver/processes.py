"""Processes of this machine: their families, and their ends."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.internet.interfaces import IReadDescriptor
from zope.interface import implementer


def kill_family(leader: int) -> None:
    """SIGKILL a process, its descendants, and every process of the group that it leads.

    Costs as much as the family is large, whatever else the machine runs (proc(5): task/TID/children).
    """
    own = os.getpid()
    doomed = family(leader)
    with contextlib.suppress(ProcessLookupError):
        if leader > 1 and os.getpgid(leader) == leader:
            os.killpg(leader, signal.SIGKILL)
    for pid in doomed:
        if pid > 1 and pid != own:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def family(leader: int) -> list[int]:
    """A process and its descendants, as they are now."""
    found = [leader]
    for pid in found:
        found += [child for child in _children(pid) if child not in found]
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


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
