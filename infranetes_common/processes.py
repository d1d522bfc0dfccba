# SPDX-License-Identifier: Apache-2.0
"""Processes of this machine: find their descendants, kill them, notice their end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from twisted.internet.interfaces import IReactorFDSet, IReadDescriptor
from twisted.python.failure import Failure
from zope.interface import implementer


def kill_family(leader: int) -> None:
    """SIGKILL a process, its descendants, and every process of the group that it leads; of init, none.

    The cost depends on the number of descendants alone, not on what else runs (proc(5): task/TID/children).
    """
    if leader <= 1:
        return
    own = os.getpid()
    doomed = family(leader)
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(leader) == leader:
            os.killpg(leader, signal.SIGKILL)
    for pid in doomed:
        if pid != own:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


# The shell reports on stderr that it can't execute a command, and exits with 126 or 127. If it may not lower
# its oom_score_adj, it keeps the one that it has.
_SHELL = '{ echo "$1" >/proc/self/oom_score_adj; } 2>/dev/null; cd "$2" && shift 2 && exec "$@"'


def as_command(command: Sequence[str], cwd: str, oom_score_adj: int) -> list[str]:
    """Return the arguments of a shell that sets its oom_score_adj, goes to `cwd` and executes `command`.

    The agent's own score protects it from the OOM killer: if a command inherited that, the kernel would kill
    the application in its place. The shell changes the directory, not `spawnProcess`: without a `path`,
    Twisted 24.11 starts a process by posix_spawn, unless it has a terminal. Unlike fork's, its time does not
    grow with the agent's memory.

    :param cwd: taken from "/" if it is relative.
    """
    return ["/bin/sh", "-c", _SHELL, "sh", str(oom_score_adj), os.path.join("/", cwd), *command]


def oom_score_adj(pid: int) -> int:
    """Return a process's oom_score_adj. :raise ProcessLookupError: there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())
    except OSError:
        raise ProcessLookupError(pid) from None


def family(leader: int) -> list[int]:
    """Return the pids of a process and its present descendants."""
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
    """Return when a process started, in clock ticks since boot; 0 if there is no such process.

    Together with the pid this identifies a process even after the pid is used again."""
    return process_state(pid)[1]


def process_state(pid: int) -> tuple[str, int]:
    """Return a process's state (proc(5): R, S, T, Z...) and `start_ticks`; "" and 0 if there is none."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return words[0], int(words[19])
    except (OSError, IndexError, ValueError):
        return "", 0


def runs(pid: int, ticks: int) -> bool:
    """Return whether the process that started at `ticks` goes on. A zombie does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return int(fields[19]) == ticks and fields[0] not in ("Z", "X")


@implementer(IReadDescriptor)
class ProcessEnd:
    """Calls `ended` in the reactor's thread once a process has ended, whoever its parent is.

    :raise ProcessLookupError: it has ended already.
    """

    def __init__(self, reactor: IReactorFDSet, pid: int, ended: Callable[[], None]) -> None:
        self._reactor = reactor
        self._ended = ended
        self._fd = os.pidfd_open(pid)
        reactor.addReader(self)

    def fileno(self) -> int:
        return self._fd

    def logPrefix(self) -> str:
        return "process"

    def doRead(self) -> None:
        # The reactor may also deliver an event that it had fetched for an earlier file with the same number.
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if poll.poll(0):
            self.close()
            self._ended()

    def connectionLost(self, reason: Failure) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._fd >= 0:
            self._reactor.removeReader(self)
            os.close(self._fd)
            self._fd = -1
