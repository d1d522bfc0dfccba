"""Live sessions of the fake provider: a plain process, with a terminal of its own where one is wanted; and
what a container's supervisor keeps of its output, with its stdin behind a FIFO."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import struct
import termios
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from twisted.internet import fdesc
from twisted.internet.abstract import FileDescriptor
from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes_common import vmserver as messages
from infranetes_common.errors import InfranetesError, Unavailable
from vmserver.containers.fake.execs import DRAIN_SECONDS
from vmserver.containers.interface import ISession, Streams
from vmserver.containers.sessions import Output, Room
from vmserver.processes import kill_family

_SHELL = "/bin/sh"
_SCRIPT = 'cd "$0" && exec "$@"'
_TIOCGPTPEER = 0x5441  # ioctl_tty(2); termios has no name for it
_END_OF_FILE = b"\x04"
_STREAM_OF = {1: "stdout", 2: "stderr"}


@implementer(ISession)
class ExecSession(ProcessProtocol):
    """A command as a child of this process."""

    transport: Any

    def __init__(self, reactor: Any, streams: Streams) -> None:
        self._reactor = reactor
        self._streams = streams
        self._room = Room()
        self._pid = 0
        self._over = False
        self._stdin_open = streams.stdin
        self._ended: Deferred[int] = Deferred()
        self._timer: Any = None
        self._held = -1  # the command's end of its terminal
        self.output = Output(self._pause, self._resume)

    @classmethod
    def spawn(
        cls, reactor: Any, command: Sequence[str], env: Mapping[str, str], cwd: str, streams: Streams
    ) -> ExecSession:
        """Start `command` in `cwd`."""
        session = cls(reactor, streams)
        arguments = [_SHELL, "-c", _SCRIPT, cwd, *command]
        if streams.tty:
            with_terminal = {"TERM": "xterm", **env}
            reactor.spawnProcess(session, _SHELL, arguments, env=with_terminal, path="/", usePTY=True)
            return session
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            descriptors = {
                0: "w" if streams.stdin else null,
                1: "r" if streams.stdout else null,
                2: "r" if streams.stderr else null,
            }
            reactor.spawnProcess(session, _SHELL, arguments, env=dict(env), path="/", childFDs=descriptors)
        finally:
            os.close(null)
        return session

    # ProcessProtocol

    def connectionMade(self) -> None:
        self._pid = self.transport.pid
        if self._streams.tty:
            # A command that closes its own as the last thing would be hung up before it has its exit code.
            flags = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC
            self._held = fcntl.ioctl(self.transport.fileno(), _TIOCGPTPEER, flags)
        writer = self._writer()
        if writer is not None:
            writer.registerProducer(self._room, True)

    def _writer(self) -> Any:
        return self.transport if self._streams.tty else self.transport.pipes.get(0)

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        if not self._streams.tty or self._streams.stdout:
            self.output.put(_STREAM_OF[childFD], data)

    def childConnectionLost(self, childFD: int) -> None:
        if childFD == 0:
            self._stdin_open = False
            self._room.stopProducing()

    def processExited(self, reason: Any) -> None:
        if self._held >= 0:
            os.close(self._held)
            self._held = -1
        self._timer = self._reactor.callLater(DRAIN_SECONDS, self._let_go)

    def _let_go(self) -> None:
        """What still has its output open is a process that it left behind."""
        if self.output.paused:
            self._timer = self._reactor.callLater(DRAIN_SECONDS, self._let_go)
        elif self._streams.tty:
            self.transport.unregisterProducer()
            self.transport.loseConnection()
        else:
            for descriptor in list(self.transport.pipes):
                self.transport.closeChildFD(descriptor)

    def processEnded(self, reason: Any) -> None:
        self._over = True
        self._stdin_open = False
        self._room.stopProducing()
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        status = reason.value
        code = status.exitCode if status.exitCode is not None else 128 + (status.signal or 0)
        self._ended.callback(code)
        self.output.end()

    # ISession

    def _pause(self) -> None:
        if not self._over:
            self.transport.pauseProducing()

    def _resume(self) -> None:
        if not self._over:
            self.transport.resumeProducing()

    def write(self, data: bytes) -> Deferred[None]:
        return Deferred.fromCoroutine(self._write(data))

    async def _write(self, data: bytes) -> None:
        writer = self._writer() if self._stdin_open else None
        if writer is not None:
            writer.write(data)
            await self._room.wait()

    def close_stdin(self) -> None:
        if not self._stdin_open:
            return
        self._stdin_open = False
        if self._streams.tty:
            self.transport.write(_END_OF_FILE)
            return
        writer = self._writer()
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
            kill_family(self._pid)
            self._resume()  # nobody reads on; what is left is dropped
            self.output.end()


class Fifo(FileDescriptor):
    """The writing end of a FIFO that has a reader."""

    def __init__(self, reactor: Any, path: Path, producer: Any) -> None:
        super().__init__(reactor)
        self._fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._producer = producer
        self.connected = 1
        self.registerProducer(producer, True)

    def fileno(self) -> int:
        return self._fd

    def writeSomeData(self, data: bytes) -> Any:
        return fdesc.writeToFD(self._fd, data)

    def connectionLost(self, reason: Any) -> None:
        if self._fd >= 0:
            super().connectionLost(reason)  # type: ignore[no-untyped-call]
            os.close(self._fd)
            self._fd = -1
            self._producer.stopProducing()


@implementer(ISession)
class AttachSession:
    """What a container writes from now on, as its log has it; and its stdin.

    :param records: the container's LogRecords, followed. :param since: nanoseconds; older ones are left out.
    :param stdin: its FIFO, None: it has none. :param supervisor: told when stdin ends; 0: never.
    :param ended: gives the container's exit code, once it has ended.
    """

    def __init__(
        self,
        reactor: Any,
        records: AsyncIterator[Any],
        since: int,
        streams: Streams,
        stdin: Path | None,
        supervisor: int,
        ended: Any,
    ) -> None:
        self._streams = streams
        self._since = since
        self._supervisor = supervisor
        self._exit_code = ended
        self._output_room, self._input_room = Room(), Room()
        self.output = Output(self._output_room.pauseProducing, self._output_room.resumeProducing)
        self._fifo: Fifo | None = None
        if stdin is not None and streams.stdin:
            try:
                self._fifo = Fifo(reactor, stdin, self._input_room)
            except OSError as error:
                if error.errno not in (errno.ENXIO, errno.ENOENT):  # nobody reads any more
                    raise Unavailable(f"the container's stdin can't be opened: {error.strerror}") from error
        self._pumping = Deferred.fromCoroutine(self._pump(records))

    async def _pump(self, records: AsyncIterator[Any]) -> None:
        try:
            async for record in records:
                error = record.stream == messages.LogRecord.STDERR
                if record.time_nanos < self._since:
                    continue
                if self._streams.stderr if error else self._streams.stdout:
                    line = record.line if record.partial else record.line + b"\n"
                    self.output.put("stderr" if error else "stdout", line)
                await self._output_room.wait()
        except CancelledError:
            pass
        except InfranetesError as broken:
            self.output.fail(broken)
        finally:
            self.output.end()
            await records.aclose()  # type: ignore[attr-defined]

    def write(self, data: bytes) -> Deferred[None]:
        if self._fifo is None or not self._fifo.connected:
            return succeed(None)
        self._fifo.write(data)
        return Deferred.fromCoroutine(self._input_room.wait())

    def close_stdin(self) -> None:
        fifo: Any = self._fifo
        self._fifo = None
        if fifo is None:
            return
        if self._supervisor:
            # It holds the FIFO open for whoever attaches; without that, the reader sees the end.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._supervisor, signal.SIGUSR1)
        if fifo.connected:
            fifo.unregisterProducer()
            fifo.loseConnection()

    def resize(self, width: int, height: int) -> Deferred[None]:
        return succeed(None)

    def ended(self) -> Deferred[int]:
        return succeed(int(self._exit_code()))

    def close(self) -> None:
        fifo = self._fifo
        self.close_stdin()
        if fifo is not None and fifo.connected:
            fifo.connectionLost(Failure(ConnectionDone()))
        self._pumping.cancel()
