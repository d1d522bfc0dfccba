# SPDX-License-Identifier: Apache-2.0
"""Exec and attach for providers whose commands are children of the agent.

An exec is a child process, with a terminal of its own if it is to have one. An attached client reads the
container's log, and writes to a FIFO that is the container's stdin.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import struct
import termios
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from twisted.internet import fdesc
from twisted.internet.abstract import FileDescriptor
from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IDelayedCall, IReactorFDSet
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes_common.commands import exit_code, shell_code
from infranetes_common.concurrency import deferred, start
from infranetes_common.errors import InfranetesError, Unavailable
from infranetes_common.processes import as_command, kill_family
from infranetes_common.reactors import IReactor
from infranetes_common.wire import vmserver as messages
from vmserver.containers import pipes
from vmserver.containers.child_exec import DRAIN_SECONDS, spawn
from vmserver.containers.interface import ISession, Streams
from vmserver.containers.sessions import Output, WriteGate
from vmserver.containers.terminals import open_peer

_END_OF_FILE = b"\x04"
_STREAM_OF = {1: "stdout", 2: "stderr"}


@implementer(ISession)
class ExecSession(ProcessProtocol):
    """A command as a child of this process.

    :param drain: for how many seconds after its end the output of its descendants is read.
    """

    transport: Any  # Any: a Process, or with a terminal a PTYProcess; they have little in common

    def __init__(self, reactor: IReactor, streams: Streams, drain: float = DRAIN_SECONDS) -> None:
        self._reactor = reactor
        self._streams = streams
        self._drain = drain
        self._gate = WriteGate()
        self._pid = 0
        self._over = False
        self._stdin_open = streams.stdin
        self._ended: Deferred[int] = Deferred()
        self._timer: IDelayedCall | None = None
        self._terminal = -1  # the command's end of the terminal
        self.output = Output(self._pause, self._resume)

    @classmethod
    def spawn(
        cls,
        reactor: IReactor,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        oom_score_adj: int,
        streams: Streams,
    ) -> ExecSession:
        """Start `command` in `cwd` with this oom_score_adj, the container's.

        :raise InvalidArgument, Unavailable: see `child_exec.spawn`."""
        session = cls(reactor, streams)
        arguments = as_command(command, cwd, oom_score_adj)
        if streams.tty:
            with_terminal = {"TERM": "xterm", **env}
            spawn(reactor, session, arguments, with_terminal, usePTY=True)
            return session
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            descriptors = {
                0: "w" if streams.stdin else null,
                1: "r" if streams.stdout else null,
                2: "r" if streams.stderr else null,
            }
            spawn(reactor, session, arguments, env, childFDs=descriptors)
        finally:
            os.close(null)
        return session

    # ProcessProtocol

    def connectionMade(self) -> None:
        self._pid = self.transport.pid
        if self._streams.tty:
            # Hold the command's end of the terminal open until the session ends: once its last descriptor is
            # closed, the kernel hangs up the command, which may not have set its exit code yet.
            self._terminal = open_peer(self.transport.fileno())
        else:
            pipes.widen(self.transport)
            pipes.open_output(self.transport)
        writer = self._stdin_writer()
        if writer is not None:
            writer.registerProducer(self._gate, True)

    def _stdin_writer(self) -> Any:  # Any: like `transport`
        return self.transport if self._streams.tty else self.transport.pipes.get(0)

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        if not self._streams.tty or self._streams.stdout:
            self.output.put(_STREAM_OF[childFD], data)

    def childConnectionLost(self, childFD: int) -> None:
        if childFD == 0:
            self._stdin_open = False
            self._gate.stopProducing()

    def processExited(self, reason: Failure) -> None:
        if self._terminal >= 0:
            os.close(self._terminal)
            self._terminal = -1
        self._timer = self._reactor.callLater(self._drain, self._close_output)

    def _close_output(self) -> None:
        """Stop reading the output of surviving descendants, once what they have written is read."""
        if self.output.paused:
            self._timer = self._reactor.callLater(self._drain, self._close_output)
        elif self._streams.tty:
            self.transport.unregisterProducer()
            self.transport.loseConnection()
        else:
            for descriptor in list(self.transport.pipes):
                self.transport.closeChildFD(descriptor)

    def processEnded(self, reason: Failure) -> None:
        self._over = True
        self._stdin_open = False
        self._gate.stopProducing()
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._ended.callback(self.exit_code(shell_code(exit_code(reason))))
        self.output.end()

    # Hooks for subclasses

    def exit_code(self, code: int) -> int:
        """Return the session's exit code. Called once, when all has ended."""
        return code

    def kill(self) -> None:
        """Kill the command and its descendants."""
        kill_family(self._pid)

    # ISession

    def _pause(self) -> None:
        if not self._over:
            self.transport.pauseProducing()

    def _resume(self) -> None:
        if not self._over:
            self.transport.resumeProducing()

    @deferred
    async def write(self, data: bytes) -> None:
        writer = self._stdin_writer() if self._stdin_open else None
        if writer is not None:
            writer.write(data)
            await self._gate.wait()

    def close_stdin(self) -> None:
        if not self._stdin_open:
            return
        self._stdin_open = False
        if self._streams.tty:
            self.transport.write(_END_OF_FILE)
            return
        writer = self._stdin_writer()
        if writer is not None:
            writer.unregisterProducer()
            writer.loseConnection()

    def resize(self, width: int, height: int) -> Deferred[None]:
        if self._streams.tty and not self._over and self.transport.connected:
            size = struct.pack("HHHH", height, width, 0, 0)
            with contextlib.suppress(OSError):
                fcntl.ioctl(self.transport.fileno(), termios.TIOCSWINSZ, size)
        return succeed(None)

    def ended(self) -> Deferred[int]:
        return self._ended

    def close(self) -> None:
        if not self._over:
            self.kill()
            self._resume()  # the remaining output is dropped
            self.output.end()


class Fifo(FileDescriptor):
    """The writing end of a FIFO. :raise OSError: it has no reader."""

    def __init__(self, reactor: IReactorFDSet, path: Path, producer: WriteGate) -> None:
        super().__init__(reactor)
        self._fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._producer = producer
        self.connected = 1
        self.registerProducer(producer, True)

    def fileno(self) -> int:
        return self._fd

    def writeSomeData(self, data: bytes) -> int | BaseException:
        written: int | BaseException = fdesc.writeToFD(self._fd, data)
        return written

    def connectionLost(self, reason: Failure) -> None:
        if self._fd >= 0:
            super().connectionLost(reason)  # type: ignore[no-untyped-call]
            os.close(self._fd)
            self._fd = -1
            self._producer.stopProducing()


@implementer(ISession)
class AttachSession:
    """A container's output from now on, according to its log, and its stdin.

    :param records: the container's log, followed.
    :param since: older records are skipped; nanoseconds since 1970.
    :param stdin: the container's FIFO; None if it has no stdin.
    :param supervisor: the process that gets SIGUSR1 when stdin is to end; 0 for none.
    :param exit_code: returns the container's exit code, once it has ended.
    """

    def __init__(
        self,
        reactor: IReactorFDSet,
        records: AsyncGenerator[messages.LogRecord, None],
        since: int,
        streams: Streams,
        stdin: Path | None,
        supervisor: int,
        exit_code: Callable[[], int],
    ) -> None:
        self._streams = streams
        self._since = since
        self._supervisor = supervisor
        self._exit_code = exit_code
        self._output_gate, self._input_gate = WriteGate(), WriteGate()
        self.output = Output(self._output_gate.pauseProducing, self._output_gate.resumeProducing)
        self._fifo: Fifo | None = None
        if stdin is not None and streams.stdin:
            try:
                self._fifo = Fifo(reactor, stdin, self._input_gate)
            except OSError as error:
                if error.errno not in (errno.ENXIO, errno.ENOENT):  # the FIFO has no reader any more
                    raise Unavailable(f"the container's stdin can't be opened: {error.strerror}") from error
        self._closed = False
        self._pumping = start(self._pump(records))

    async def _pump(self, records: AsyncGenerator[messages.LogRecord, None]) -> None:
        try:
            async for record in records:
                error = record.stream == messages.LogRecord.STDERR
                if record.time_nanos < self._since:
                    continue
                if self._streams.stderr if error else self._streams.stdout:
                    line = record.line if record.partial else record.line + b"\n"
                    self.output.put("stderr" if error else "stdout", line)
                await self._output_gate.wait()
        except CancelledError:
            pass
        except InfranetesError as broken:
            self.output.fail(broken)
        finally:
            self.output.end()
            await records.aclose()

    def write(self, data: bytes) -> Deferred[None]:
        if self._fifo is None or not self._fifo.connected:
            return succeed(None)
        self._fifo.write(data)
        return start(self._input_gate.wait())

    def close_stdin(self) -> None:
        fifo, self._fifo = self._fifo, None
        if fifo is None:
            return
        if self._supervisor:
            # The supervisor keeps the FIFO open for later clients. Make it close the FIFO, so that the reader
            # gets end-of-file.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._supervisor, signal.SIGUSR1)
        if fifo.connected:
            fifo.unregisterProducer()
            fifo.loseConnection()  # type: ignore[no-untyped-call]

    def resize(self, width: int, height: int) -> Deferred[None]:
        return succeed(None)

    def ended(self) -> Deferred[int]:
        return succeed(int(self._exit_code()))

    def close(self) -> None:
        fifo = self._fifo
        self.close_stdin()
        if fifo is not None and fifo.connected:
            fifo.connectionLost(Failure(ConnectionDone()))
        if not self._closed:  # another cancellation would end the wait for the end of what reads
            self._closed = True
            self._pumping.cancel()
