# SPDX-License-Identifier: Apache-2.0
"""The controlling end of a pseudo-terminal, and how crun hands it over."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import struct
import termios
from collections.abc import Callable
from pathlib import Path

from twisted.internet import fdesc
from twisted.internet.abstract import FileDescriptor
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import (
    IFileDescriptorReceiver,
    IHalfCloseableDescriptor,
    IListeningPort,
    IReactorFDSet,
    IReactorUNIX,
)
from twisted.internet.protocol import Factory, Protocol
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes_common.errors import Unavailable
from vmserver.containers.sessions import WriteGate
from vmserver.containers.terminals import open_peer

_CHUNK_BYTES = 64 * 1024
_MAX_PATH_BYTES = 107  # the limit of unix(7)


@implementer(IHalfCloseableDescriptor)
class Terminal(FileDescriptor):
    """The controlling end of a pseudo-terminal.

    :param received: called with the data written to the terminal. :param over: called once no process has it
        open any longer and all is read. Only `hang_up` hangs the terminal up.
    """

    def __init__(
        self,
        reactor: IReactorFDSet,
        descriptor: int,
        gate: WriteGate,
        received: Callable[[bytes], None],
        over: Callable[[], None],
    ) -> None:
        super().__init__(reactor)
        self._fd = descriptor
        self._gate = gate
        self._received = received
        self._over = over
        self._paused = False
        self._ended = False
        self._dropping = False  # whether what is written is dropped, since nobody can read it
        fdesc.setNonBlocking(descriptor)
        self.connected = 1
        self.registerProducer(gate, True)
        self.startReading()  # type: ignore[no-untyped-call]

    def fileno(self) -> int:
        return self._fd

    def doRead(self) -> None:
        try:
            data = os.read(self._fd, _CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:  # EIO: every process has closed it
            data = b""
        if data:
            self._received(data)
        else:
            self._end()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self.stopReading()  # type: ignore[no-untyped-call]
            self._over()

    def readConnectionLost(self, reason: Failure) -> None:
        """End. Reactors that are told of a hang-up call this in place of `doRead`."""
        self._end()

    def writeConnectionLost(self, reason: Failure) -> None:
        pass

    def connectionLost(self, reason: Failure) -> None:
        """Drop what is not written yet, and read on: called by the reactor if writing fails."""
        self._dropping = True
        self.stopWriting()  # type: ignore[no-untyped-call]
        self._gate.stopProducing()
        self._read_on()

    def pauseProducing(self) -> None:
        """Stop reading."""
        self._paused = True
        if self.connected:
            self.stopReading()  # type: ignore[no-untyped-call]

    def resumeProducing(self) -> None:
        """Read again."""
        self._paused = False
        self._read_on()

    def _read_on(self) -> None:
        if self.connected and not self._ended and not self._paused:
            self.startReading()  # type: ignore[no-untyped-call]

    def write(self, data: bytes) -> None:
        """Write, or drop it once nobody can read it."""
        if not self._dropping:
            super().write(data)

    def writeSomeData(self, data: bytes) -> int | BaseException:
        written: int | BaseException = fdesc.writeToFD(self._fd, data)
        return written

    def resize(self, width: int, height: int) -> None:
        """Set its size in characters."""
        if self.connected:
            with contextlib.suppress(OSError, struct.error):
                fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def notice_end(self) -> None:
        """See to it that the end is noticed also if no process has ever had the terminal open.

        The kernel tells it at a process's last close, here this one's.
        """
        if self.connected:
            with contextlib.suppress(OSError):
                os.close(open_peer(self._fd))

    def hang_up(self) -> None:
        """Close it: its processes get SIGHUP. Idempotent."""
        if self.connected:
            super().connectionLost(Failure(ConnectionDone()))  # type: ignore[no-untyped-call]
            os.close(self._fd)
            self._fd = -1


class ConsoleSocket:
    """A socket on which crun hands over the terminal that it has made.

    :ivar path: where crun connects. :ivar received: the terminal's descriptor, which is then the caller's.
    :param directory: private, with a short path.
    :raise Unavailable: the socket can't be made.
    """

    def __init__(self, reactor: IReactorUNIX, directory: Path) -> None:
        self.path = directory / f"{secrets.token_hex(6)}.tty"
        self.received: Deferred[int] = Deferred(lambda _: None)
        if len(os.fsencode(self.path)) > _MAX_PATH_BYTES:
            raise Unavailable(f"the path {directory} is too long for a socket; configure a shorter one")
        self._port: IListeningPort | None = reactor.listenUNIX(
            str(self.path), Factory.forProtocol(lambda: _Receiver(self)), mode=0o600
        )

    def take(self, descriptor: int) -> None:
        """Take a descriptor that has come; the second one is closed."""
        if self.received.called:
            os.close(descriptor)
        else:
            self.received.callback(descriptor)
            self.close()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        port, self._port = self._port, None
        if port is not None:
            port.stopListening()


@implementer(IFileDescriptorReceiver)
class _Receiver(Protocol):
    """crun's connection."""

    def __init__(self, socket: ConsoleSocket) -> None:
        self._socket = socket

    def fileDescriptorReceived(self, descriptor: int) -> None:
        self._socket.take(descriptor)
        assert self.transport is not None
        self.transport.loseConnection()
