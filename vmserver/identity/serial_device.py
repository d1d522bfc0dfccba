# SPDX-License-Identifier: Apache-2.0
"""A virtio-serial port as a transport that comes and goes with the host's side.

Linux's virtio_console has peculiarities: while nobody is connected on the host's side a read returns nothing
(as at a file's end), a write would block, and poll reports "hung up" without end. So the device is handed to
the reactor only while its other side is there, and looked at now and then otherwise. Each `read` returns at
most what QEMU has sent at once, 4 KiB, and each `write` takes at most 32 KiB: so many of them are asked for
by one call of `readv` and `writev`.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable

from twisted.internet.abstract import FileDescriptor
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.main import CONNECTION_DONE, CONNECTION_LOST
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes_common.reactors import IReactor
from infranetes_common.transports import ByteTransport

SOON_SECONDS = 10.0  # after the start, and after the host's side has left: somebody is about to come
FAST_SECONDS, SLOW_SECONDS = 0.02, 0.5  # between two looks for the host's side, then and later
_READ, _READS = 4 * 1024, 32  # bytes of one read, and reads in one call
_WRITE = 32 * 1024  # bytes of one write

_log = Logger()


@implementer(ByteTransport)
class HostConnection(FileDescriptor):
    """The transport of the time that the host's side is there once.

    :param received: called with what comes. :param gone: called when the host's side is gone.
    """

    # Bytes to write, beyond which a producer is paused: what a turn can write, and more.
    bufferSize = 256 * 1024

    def __init__(
        self,
        reactor: IReactor,
        fd: int,
        received: Callable[[bytes], None],
        gone: Callable[[Failure], None],
    ) -> None:
        super().__init__(reactor)
        self.connected = 1
        self._fd = fd
        self._received = received
        self._gone = gone
        self._bytes = bytearray(_READ * _READS)
        whole = memoryview(self._bytes)
        self._pieces = [whole[at : at + _READ] for at in range(0, len(whole), _READ)]

    def fileno(self) -> int:
        return self._fd

    def logPrefix(self) -> str:
        return "agent's port"

    def doRead(self) -> Exception | None:
        try:
            size = os.readv(self._fd, self._pieces)
        except BlockingIOError:
            return None
        except OSError:
            return CONNECTION_LOST
        if not size:
            return CONNECTION_DONE
        self._received(bytes(memoryview(self._bytes)[:size]))
        return None

    def writeSomeData(self, data: bytes) -> int | Exception:
        view = memoryview(data)
        try:
            return os.writev(self._fd, [view[at : at + _WRITE] for at in range(0, len(view), _WRITE)])
        except BlockingIOError:
            return 0
        except OSError:
            return CONNECTION_LOST

    def abortConnection(self) -> None:
        """End it at once; what is not written is dropped. The device stays open."""
        if self.connected:
            self.connectionLost(Failure(ConnectionLost()))

    def connectionLost(self, reason: Failure) -> None:
        """Called by the reactor at a hang-up, and when it stops."""
        if self.connected:
            super().connectionLost(reason)  # type: ignore[no-untyped-call]
            self._gone(reason)


class SerialDevice:
    """The device, from `start` to `stop`.

    :param opened: returns the open device's descriptor, not blocking, which is closed at the end.
    :param made: called with each connection; it may be that of a host's side which was there before the
        device was opened (`before`), and has talked to somebody else.
    :param received: called with what comes. :param gone: called when the connection is over.
    """

    def __init__(
        self,
        reactor: IReactor,
        opened: Callable[[], int],
        made: Callable[[HostConnection, bool], None],
        received: Callable[[bytes], None],
        gone: Callable[[Failure], None],
    ) -> None:
        self._reactor = reactor
        self._open = opened
        self._made = made
        self._received = received
        self._report_gone = gone
        self._fd = -1
        self._connection: HostConnection | None = None
        self._timer: IDelayedCall | None = None
        self._soon = 0.0  # until then it looks often

    def start(self) -> None:
        """Open the device. :raise OSError: it can't be."""
        self._fd = self._open()
        self._soon = self._reactor.seconds() + SOON_SECONDS
        self._look(before=True)

    def stop(self) -> None:
        """Write what goes at once, and close the device. Idempotent."""
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None
        fd, self._fd = self._fd, -1
        connection = self._connection
        if connection is not None:
            connection.doWrite()  # type: ignore[no-untyped-call]
            connection.connectionLost(Failure(ConnectionDone()))
        if fd >= 0:
            os.close(fd)

    def _look(self, before: bool = False) -> None:
        """Make a connection if the host's side is there."""
        self._timer = None
        if not _host_is_there(self._fd):
            often = self._reactor.seconds() < self._soon
            pause = FAST_SECONDS if often else SLOW_SECONDS
            self._timer = self._reactor.callLater(pause, self._look)
            return
        connection = HostConnection(self._reactor, self._fd, self._received, self._gone)
        self._connection = connection
        self._made(connection, before)
        connection.startReading()  # type: ignore[no-untyped-call]

    def _gone(self, reason: Failure) -> None:
        self._connection = None
        self._report_gone(reason)
        if self._fd >= 0 and self._timer is None:
            self._soon = self._reactor.seconds() + SOON_SECONDS
            self._timer = self._reactor.callLater(FAST_SECONDS, self._look)


def open_port(path: str) -> int:
    """Open a virtio-serial port. :raise OSError: it is not there, or somebody else has it."""
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def _host_is_there(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return not any(found & (select.POLLHUP | select.POLLERR) for _, found in poll.poll(0))
