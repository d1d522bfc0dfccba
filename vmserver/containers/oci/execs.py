# SPDX-License-Identifier: Apache-2.0
"""Commands in running containers, with their streams: see `vmserver.containers.oci.exec_launch`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.process import Process
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes_common.commands import exit_code, shell_code
from infranetes_common.concurrency import deferred
from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import IReactor
from vmserver.containers import pipes
from vmserver.containers.child_exec import DRAIN_SECONDS, Captured
from vmserver.containers.child_sessions import ExecSession
from vmserver.containers.interface import ExecResult, ISession, Streams
from vmserver.containers.oci.exec_launch import CommandGroups, ExecLaunch
from vmserver.containers.oci.runtime import Crun
from vmserver.containers.oci.terminal import ConsoleSocket, Terminal
from vmserver.containers.sessions import Output, WriteGate

_END_OF_FILE = b"\x04"
_TURNS = 5  # reactor turns to receive a descriptor from a socket: accept, receive, and a few spare ones


class Execs:
    """Executes commands in containers.

    :param directory: for sockets and pid files: private, exists, and has a short path.
    :param drain: for how many seconds after a command's end the output of its descendants is read.
    """

    def __init__(self, reactor: IReactor, crun: Crun, directory: Path, drain: float = DRAIN_SECONDS) -> None:
        self._reactor = reactor
        self._drain = drain
        self._crun = crun
        self._directory = directory
        self._groups = CommandGroups()

    async def exec_sync(
        self, id: str, process: Mapping[str, object], oom_score_adj: int, timeout: float, max_output: int
    ) -> ExecResult:
        """Run a command to its end: see `IContainerProvider.exec_sync`.

        :param process: the OCI runtime-spec's `process` to execute. :param oom_score_adj: the container's.
        """
        launch = self._launch(id, {**process, "terminal": False}, oom_score_adj)
        command = _SyncCommand(self._reactor, max_output, launch, self._drain)
        launch.spawn(command, {0: "w", 1: "r", 2: "r"})
        command.transport.closeStdin()
        return await command.finished(timeout)

    async def exec_session(
        self, id: str, process: Mapping[str, object], oom_score_adj: int, streams: Streams
    ) -> ISession:
        """Run a command with live streams: see `IContainerProvider.exec_session`."""
        launch = self._launch(id, {**process, "terminal": streams.tty}, oom_score_adj)
        if streams.tty:
            console = ConsoleSocket(self._reactor, self._directory)
            session = TerminalSession(self._reactor, streams, launch, console, self._drain)
            try:
                await session.ready
            except CancelledError:
                session.close()
                raise
            return session
        piped = PipedSession(self._reactor, streams, launch, self._drain)
        launch.spawn(
            piped,
            {0: "w" if streams.stdin else None, 1: "r" if streams.stdout else None, 2: "r"},
        )
        return piped

    def _launch(self, id: str, process: Mapping[str, object], oom_score_adj: int) -> ExecLaunch:
        status = self._crun.status(id)
        if status is None or not status.alive or status.waiting:
            raise FailedPrecondition(f"container {id} is not running")
        specification = json.dumps(process).encode()
        return ExecLaunch(
            self._reactor,
            self._crun,
            id,
            status,
            specification,
            oom_score_adj,
            self._directory,
            self._groups,
            self._drain,
        )


class _SyncCommand(Captured):
    transport: Process

    def __init__(self, reactor: IReactor, limit: int, launch: ExecLaunch, drain: float) -> None:
        super().__init__(reactor, limit, drain)
        self._launch = launch

    def connectionMade(self) -> None:
        super().connectionMade()
        pipes.open_output(self.transport)
        self._launch.began(self.transport)

    def childDataReceived(self, fd: int, data: bytes) -> None:
        self._launch.heard(data)
        super().childDataReceived(fd, data)

    def result(self, stdout: bytes, stderr: bytes, code: int) -> ExecResult:
        self._launch.over()
        if self._launch.failure is not None and not self.done.called:
            self.done.errback(self._launch.failure)
        return ExecResult(stdout, stderr, self._launch.exit_code(code))

    def kill(self) -> None:
        self._launch.kill()


class PipedSession(ExecSession):
    """A command whose streams are pipes."""

    transport: Process

    def __init__(self, reactor: IReactor, streams: Streams, launch: ExecLaunch, drain: float) -> None:
        super().__init__(reactor, streams, drain)
        self._launch = launch

    def connectionMade(self) -> None:
        self._launch.began(self.transport)
        super().connectionMade()

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        self._launch.heard(data)
        if childFD == 1 or self._streams.stderr:
            super().childDataReceived(childFD, data)

    def exit_code(self, code: int) -> int:
        self._launch.over()
        if self._launch.failure is not None:
            self.output.fail(self._launch.failure)
        return self._launch.exit_code(code)

    def kill(self) -> None:
        self._launch.kill()


@implementer(ISession)
class TerminalSession(ProcessProtocol):
    """A command with a terminal, which crun makes in the container and hands over.

    :ivar ready: fires once the terminal is there, or the command has ended without it.
    """

    transport: Process

    def __init__(
        self, reactor: IReactor, streams: Streams, launch: ExecLaunch, console: ConsoleSocket, drain: float
    ) -> None:
        self._reactor = reactor
        self._drain = drain
        self._streams = streams
        self._launch = launch
        self._console = console
        self._gate = WriteGate()
        self._terminal: Terminal | None = None
        self._code: int | None = None
        self._read = False  # whether all of the terminal's output is read
        self._closed = False
        self._stdin_open = streams.stdin
        self._timer: IDelayedCall | None = None
        self._ended: Deferred[int] = Deferred()
        self.ready: Deferred[None] = Deferred(lambda _: None)
        self.output = Output(self._pause, self._resume)
        console.received.addCallback(self._begin)
        try:
            launch.spawn(self, {0: None, 1: None, 2: "r"}, console.path)
        except BaseException:
            console.close()
            raise

    # ProcessProtocol

    def connectionMade(self) -> None:
        self._launch.began(self.transport)

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        self._heard(data)

    def _begin(self, descriptor: int) -> None:
        self._terminal = Terminal(self._reactor, descriptor, self._gate, self._heard, self._all_read)
        if self._closed or self._ended.called:
            self._hang_up()
        elif not self.ready.called:
            self.ready.callback(None)

    def _heard(self, data: bytes) -> None:
        self._launch.heard(data)
        if self._streams.stdout and not self._closed:
            self.output.put("stdout", data)

    def _all_read(self) -> None:
        self._read = True
        self._finish()

    def processEnded(self, reason: Failure) -> None:
        self._code = shell_code(exit_code(reason))
        self._stdin_open = False
        self._gate.stopProducing()
        self._launch.over()
        self._await_terminal(_TURNS)

    def _await_terminal(self, turns: int) -> None:
        """Take a terminal that crun has handed over just before it ended: it waits in the socket."""
        if self._terminal is None and not self._closed and turns:
            self._timer = self._reactor.callLater(0, self._await_terminal, turns - 1)
            return
        self._console.close()
        if self._terminal is None or self._closed:
            self._read = True
        elif not self._read:
            self._terminal.notice_end()
            self._timer = self._reactor.callLater(self._drain, self._leave)
        self._finish()

    def _leave(self) -> None:
        """Stop reading the output of surviving descendants, after reading what is already there."""
        if self.output.paused:
            self._timer = self._reactor.callLater(self._drain, self._leave)
        else:
            self._all_read()

    def _finish(self) -> None:
        if self._code is None or not self._read or self._ended.called:
            return
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._hang_up()
        if self._launch.failure is not None:
            self.output.fail(self._launch.failure)
        self._ended.callback(self._launch.exit_code(self._code))
        self.output.end()
        if not self.ready.called:
            self.ready.callback(None)

    def _hang_up(self) -> None:
        if self._terminal is not None:
            self._terminal.hang_up()

    # ISession

    def _pause(self) -> None:
        if self._terminal is not None:
            self._terminal.pauseProducing()

    def _resume(self) -> None:
        if self._terminal is not None:
            self._terminal.resumeProducing()

    @deferred
    async def write(self, data: bytes) -> None:
        if self._stdin_open and self._terminal is not None and self._terminal.connected:
            self._terminal.write(data)
            await self._gate.wait()

    def close_stdin(self) -> None:
        if self._stdin_open and self._terminal is not None:
            self._stdin_open = False
            self._terminal.write(_END_OF_FILE)

    def resize(self, width: int, height: int) -> Deferred[None]:
        if self._terminal is not None:
            self._terminal.resize(width, height)
        return succeed(None)

    def ended(self) -> Deferred[int]:
        return self._ended

    def close(self) -> None:
        if self._ended.called or self._closed:
            return
        self._closed = True
        self._launch.kill()
        self.output.end()
        self._hang_up()
        self._read = True
        self._finish()
