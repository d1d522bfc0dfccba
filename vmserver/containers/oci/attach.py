# SPDX-License-Identifier: Apache-2.0
"""Attaching to a running container, over the socket of its conmon.

The socket preserves packets. In each packet from conmon, the first byte is the stream: 2 stdout, 3 stderr;
packets to conmon are stdin, which only terminals get in this way: see `ContainerStdin`. conmon writes to each
client in turn and waits for each: a client that does not read holds up the container and its log, until the
container ends. If a container has `stdin_once`, conmon ends its stdin with the first client that leaves,
even if that client did not want stdin. Source: containers/conmon src/conn_sock.c.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

from twisted.internet.abstract import FileDescriptor
from twisted.internet.defer import Deferred, succeed
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IReactorFDSet, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes_common.concurrency import backoff, deferred, sleep, start
from infranetes_common.errors import FailedPrecondition, Unavailable
from infranetes_common.processes import ProcessEnd
from infranetes_common.reactors import IReactor
from vmserver.containers.interface import ISession, Streams
from vmserver.containers.oci.conmon import Monitored, Process
from vmserver.containers.oci.control import Control
from vmserver.containers.oci.stdin import ContainerStdin
from vmserver.containers.sessions import Output, WriteGate

CONNECT_SECONDS = 10.0
ACCEPT_SECONDS = 2.0
LAST_BYTES = 4 * 1024 * 1024  # read after a container's end even if its client is slow; more than pipes hold
_PACKET_BYTES = 16 * 1024  # conmon's buffer has 32 KiB
_RECEIVED_BYTES = 64 * 1024  # conmon's packets have 8 KiB and a byte
_READS = 16  # in a row, before the reactor does other work
_STREAMS = {2: "stdout", 3: "stderr"}
_UNIX_SOCKETS = Path("/proc/net/unix")
_LISTENS, _CONNECTING = 0x10000, b"02"  # a flag and a state in it

_log = Logger()


async def attach(
    reactor: IReactor,
    container: Monitored,
    process: Process,
    control: Control,
    streams: Streams,
    exit_code: Callable[[], Deferred[int]],
) -> AttachSession:
    """Attach to a running container: see `IContainerProvider.attach_session`.

    :param exit_code: fires with the container's exit code once it has ended.
    :raise FailedPrecondition: it does not run. :raise Unavailable: its conmon does not answer.
    """
    connected = await _connect(reactor, container.bundle)
    try:
        await _accepted(reactor, process.conmon)
    except BaseException:
        connected.close()
        raise
    return AttachSession(reactor, connected, container, process, control, streams, exit_code)


async def _connect(clock: IReactorTime, bundle: Path) -> socket.socket:
    waited = 0.0
    pauses = backoff(0.01, 0.2)
    while True:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            # A path of any length: the path of a socket has at most 107 bytes.
            directory = os.open(bundle, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                made.connect(f"/proc/self/fd/{directory}/attach")
            finally:
                os.close(directory)
            return made
        except OSError as error:
            made.close()
            if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
                raise FailedPrecondition(f"container {bundle.name} is not running") from None
            if error.errno != errno.EAGAIN or waited > CONNECT_SECONDS:  # EAGAIN: the backlog is full
                raise Unavailable(f"the streams of {bundle} can't be reached: {error.strerror}") from error
        pause = next(pauses)
        await sleep(clock, pause)
        waited += pause


async def _accepted(clock: IReactorTime, conmon: int) -> None:
    """Wait until conmon has accepted pending connections; only accepted clients get the output.

    Gives up after `ACCEPT_SECONDS`, as when conmon is waiting for a client. Sometimes waits for another
    conmon's client, because all these sockets have the same name.
    """
    waited = 0.0
    for pause in backoff(0.005, 0.1):
        if waited >= ACCEPT_SECONDS or not _connecting(conmon):
            return
        await sleep(clock, pause)
        waited += pause


def _connecting(conmon: int) -> bool:
    """Return whether a connection to a conmon's sockets is not accepted yet. Source: Linux af_unix.c."""
    own = set()
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{conmon}/fd").iterdir():
            with contextlib.suppress(OSError):
                own.add(os.readlink(entry))
    listening, connecting = set(), set()
    for line in _UNIX_SOCKETS.read_bytes().split(b"\n")[1:]:
        fields = line.split(maxsplit=7)
        with contextlib.suppress(ValueError):  # without a name, or a part of a name that has newlines
            _, _, _, flags, _, state, inode, name = fields
            if int(flags, 16) & _LISTENS and f"socket:[{int(inode)}]" in own:
                listening.add(name)
            elif state == _CONNECTING:
                connecting.add(name)
    return bool(listening & connecting)


@implementer(ISession)
class AttachSession:
    """One client of a container's streams."""

    def __init__(
        self,
        reactor: IReactor,
        connected: socket.socket,
        container: Monitored,
        process: Process,
        control: Control,
        streams: Streams,
        exit_code: Callable[[], Deferred[int]],
    ) -> None:
        self._container = container
        self._control = control
        self._streams = streams
        self._exit_code = exit_code
        self._stdin_open = streams.stdin and container.stdin
        self._draining = False
        self._drained = 0
        self.output = Output(self._pause, self._resume)
        self._connection = _Packets(reactor, connected, self._received, self._over)
        self._pipe: ContainerStdin | None = None
        if self._stdin_open and not container.terminal:
            try:
                self._pipe = ContainerStdin(reactor, process.conmon)
            except Unavailable as error:
                _log.warn("container {id} gets its stdin from conmon: {error}", id=container.id, error=error)
        self._end: ProcessEnd | None = None
        try:
            self._end = ProcessEnd(reactor, process.pid, self._drain)
        except ProcessLookupError:
            self._drain()

    def _received(self, packet: bytes) -> None:
        stream = _STREAMS.get(packet[0])
        wanted = self._streams.stdout if stream == "stdout" else self._streams.stderr
        if stream is None or not wanted:
            return
        if self._draining:
            self._drained += len(packet)
            if self._drained > LAST_BYTES:
                self._over()
                return
        self.output.put(stream, packet[1:])

    def _over(self) -> None:
        """End: conmon has closed the connection, or the client leaves."""
        self._stdin_open = False
        if self._end is not None:
            self._end.close()
        if self._pipe is not None:
            self._pipe.close()
        self._connection.connectionLost(Failure(ConnectionDone()))
        self.output.end()

    def _drain(self) -> None:
        """Read the remaining output, even if the client does not: conmon only ends once it is read."""
        self._draining = True
        self._connection.resumeProducing()

    def _pause(self) -> None:
        if not self._draining:
            self._connection.pauseProducing()

    def _resume(self) -> None:
        self._connection.resumeProducing()

    @deferred
    async def write(self, data: bytes) -> None:
        if self._stdin_open and data:
            to = self._pipe or self._connection
            to.write(data)
            await to.gate.wait()

    def close_stdin(self) -> None:
        if self._stdin_open:
            self._stdin_open = False
            if self._container.stdin_once and not self._container.terminal:
                if self._pipe is not None:
                    self._pipe.finish(self._connection.finish)
                else:
                    self._connection.finish()

    def resize(self, width: int, height: int) -> Deferred[None]:
        if not self._container.terminal:
            return succeed(None)
        return start(self._control.resize(width, height))

    def ended(self) -> Deferred[int]:
        return self._exit_code()

    def close(self) -> None:
        self._over()


class _Packets(FileDescriptor):
    """A connection that keeps packets apart, with flow control in both directions.

    :param received: called with each packet, which is not empty. :param over: called at the end.
    """

    def __init__(
        self,
        reactor: IReactorFDSet,
        connected: socket.socket,
        received: Callable[[bytes], None],
        over: Callable[[], None],
    ) -> None:
        super().__init__(reactor)
        self._socket = connected
        self._received = received
        self._over = over
        self._paused = False
        self.gate = WriteGate()
        self.connected = 1
        self.registerProducer(self.gate, True)
        self.startReading()  # type: ignore[no-untyped-call]

    def fileno(self) -> int:
        return self._socket.fileno()

    def doRead(self) -> None:
        for _ in range(_READS):
            if self._paused or not self.connected:
                return
            try:
                packet = self._socket.recv(_RECEIVED_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._over()
                return
            self._received(packet)

    def pauseProducing(self) -> None:
        """Stop reading."""
        self._paused = True
        if self.connected:
            self.stopReading()  # type: ignore[no-untyped-call]

    def resumeProducing(self) -> None:
        """Read again."""
        self._paused = False
        if self.connected:
            self.startReading()  # type: ignore[no-untyped-call]

    def writeSomeData(self, data: bytes) -> int | BaseException:
        try:
            return self._socket.send(data[:_PACKET_BYTES])
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # conmon reads no more; its output is still to be read

    def finish(self) -> None:
        """Send nothing further after the data already written."""
        self.unregisterProducer()
        self.loseWriteConnection()  # type: ignore[no-untyped-call]

    def _closeWriteConnection(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def connectionLost(self, reason: Failure) -> None:
        if self.connected:
            super().connectionLost(reason)  # type: ignore[no-untyped-call]
            self._socket.close()
            self.gate.stopProducing()
