# SPDX-License-Identifier: Apache-2.0
"""QEMU's processes: started, watched and found again by later daemons, which they outlive."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReadDescriptor
from twisted.internet.process import reapAllProcesses
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes_common.commands import ENVIRONMENT, exit_code, find_program, how_it_ended
from infranetes_common.concurrency import Notifier

if TYPE_CHECKING:
    from twisted.internet.process import Process

    from infranetes_common.reactors import IReactor


class SpawnedProcess(ProcessProtocol):
    """A process that this daemon started. Its output is not read; `WatchedProcess` sees its end.

    :ivar pid: its process id.
    :ivar end: how it ended, for people; "" while that is not known.
    :ivar code: its exit code, as `infranetes_common.commands` has them; None while that is not known.
    """

    pid = 0
    end = ""
    code: int | None = None

    def connectionMade(self) -> None:
        transport: Process = self.transport  # type: ignore[assignment]  # IProcessTransport has no pid
        assert transport.pid is not None
        self.pid = int(transport.pid)

    def processExited(self, reason: Failure) -> None:
        self.code = exit_code(reason)
        self.end = how_it_ended(self.code)


def spawn(reactor: IReactor, command: Sequence[str], open_files: Mapping[int, int]) -> SpawnedProcess:
    """Start `command`, which goes on when this daemon ends.

    :param open_files: descriptors of this process by the number that `command` gets them as.
    """
    child = SpawnedProcess()
    reactor.spawnProcess(
        child, find_program(command[0]), command, env=ENVIRONMENT, path="/", childFDs=dict(open_files)
    )
    return child


@implementer(IReadDescriptor)
class WatchedProcess:
    """A running process, whoever started it. A later process with the same id is not mistaken for it.

    :param ended: called once, in the reactor's thread, when the process has ended.
    :param spawned: the process, if this daemon started it; knows how it ended.
    :ivar gone: whether its end has been seen.
    :raise ProcessLookupError: it has ended already.
    """

    def __init__(
        self, reactor: IReactor, pid: int, ended: Callable[[], None], spawned: SpawnedProcess | None = None
    ) -> None:
        self.pid = pid
        self._spawned = spawned
        self._reactor = reactor
        self._ended = ended
        self._fd = os.pidfd_open(pid)
        self.gone = False
        self._killed = Notifier()
        reactor.addReader(self)

    def fileno(self) -> int:
        return self._fd

    def logPrefix(self) -> str:
        return "qemu"

    def doRead(self) -> None:
        # The reactor may also deliver an event that it had fetched for an earlier file with the same number.
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if not poll.poll(0):
            return
        self.gone = True
        if self._spawned is not None and not self._spawned.end:
            reapAllProcesses()  # so that `processExited` is called before `ended`
        self.unwatch()
        self._ended()
        self._killed.notify()

    def connectionLost(self, reason: Failure) -> None:
        self.unwatch()

    @property
    def end(self) -> str:
        """How the process ended, for people."""
        known = self._spawned.end if self._spawned is not None else ""
        return known or "ended; it is not known how, because an earlier daemon had started it"

    @property
    def code(self) -> int | None:
        """Its exit code; None: it has not ended, or an earlier daemon had started it."""
        return self._spawned.code if self._spawned is not None else None

    @property
    def alive(self) -> bool:
        """Whether the process is watched and has not ended."""
        return self._fd >= 0

    def ended(self) -> Deferred[None]:
        """Fire when the process has ended. May be cancelled."""
        return self._killed.wait() if self._fd >= 0 else succeed(None)

    def kill(self) -> Deferred[None]:
        """Send SIGKILL; fires when the process has ended."""
        if self._fd < 0:
            return succeed(None)
        ended = self._killed.wait()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        return ended

    def unwatch(self) -> None:
        """Stop watching; the process goes on. Idempotent."""
        if self._fd >= 0:
            self._reactor.removeReader(self)
            os.close(self._fd)
            self._fd = -1


def pids_by_argument(arguments: Iterable[str]) -> dict[str, list[int]]:
    """Find processes that have one of these arguments, by argument. Blocks: reads all of /proc."""
    wanted = {argument.encode(): argument for argument in arguments}
    found: dict[str, list[int]] = {}
    if not wanted:
        return found
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            given = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        for argument in wanted.keys() & set(given):
            found.setdefault(wanted[argument], []).append(int(entry.name))
    return found
