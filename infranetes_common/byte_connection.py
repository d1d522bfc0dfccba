# SPDX-License-Identifier: Apache-2.0
"""A connection whose bytes coroutines read and write, each waiting for its other side."""

from __future__ import annotations

from collections import deque

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import (
    IAddress,
    IPushProducer,
    IStreamClientEndpoint,
)
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes_common.concurrency import cancellable
from infranetes_common.errors import Unavailable
from infranetes_common.transports import StreamTransport

AHEAD_BYTES = 256 * 1024  # received and not yet read, before the other side has to wait
MOST_READ = 128 * 1024  # bytes that a reader is given at once


class ByteConnection(Protocol):
    """One connection, for one reader and one writer.

    :param what: what it leads to, for errors.
    """

    transport: StreamTransport

    def __init__(self, what: str) -> None:
        self._what = what
        self._received: deque[bytes] = deque()
        self._size = 0
        self._paused = False
        self._ended = False
        self._error: Exception | None = None
        self._readable: Deferred[None] | None = None
        self._writable: Deferred[None] | None = None
        self._full = False

    # For one's own side

    async def read(self) -> bytes:
        """Return the next bytes, once there are some; b"": the other side has closed the connection.

        :raise Unavailable: it was lost."""
        while not self._received and not self._ended:
            self._readable = Deferred()
            await self._readable
        if not self._received:
            if self._error is not None:
                raise self._error
            return b""
        data = self._taken()
        self._size -= len(data)
        if self._paused and self._size <= AHEAD_BYTES // 2 and not self._ended:
            self._paused = False
            self.transport.resumeProducing()
        return data

    def _taken(self) -> bytes:
        pieces = [self._received.popleft()]
        size = len(pieces[0])
        while self._received and size + len(self._received[0]) <= MOST_READ:
            pieces.append(self._received.popleft())
            size += len(pieces[-1])
        return b"".join(pieces)

    async def write(self, data: bytes) -> None:
        """Send bytes; returns when more may follow. :raise Unavailable: the connection is over."""
        if self._ended:
            raise self._error or Unavailable(f"{self._what} has closed the connection")
        self.transport.write(data)
        if self._full:
            self._writable = Deferred()
            await self._writable

    def done_writing(self) -> None:
        """Close the writing half once what was written is sent. Idempotent."""
        if not self._ended:
            self.transport.unregisterProducer()  # a paused one would keep it open
            self.transport.loseWriteConnection()

    def close(self) -> None:
        """Close the connection once what was written is sent. Idempotent."""
        if not self._ended:
            self.transport.unregisterProducer()
            self.transport.loseConnection()

    def abort(self) -> None:
        """Close the connection at once. Idempotent."""
        if not self._ended:
            self.transport.abortConnection()

    # For the transport

    def connectionMade(self) -> None:
        self.transport.registerProducer(_Writer(self), streaming=True)

    def dataReceived(self, data: bytes) -> None:
        self._received.append(data)
        self._size += len(data)
        if self._size > AHEAD_BYTES and not self._paused:
            self._paused = True
            self.transport.pauseProducing()
        self._wake()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._ended = True
        if not reason.check(ConnectionDone):
            self._error = Unavailable(f"the connection to {self._what} was lost: {reason.value}")
        self._wake()
        self.room()

    def full(self) -> None:
        """Have the next writer wait: the other side does not take what was written."""
        self._full = True

    def room(self) -> None:
        """Have writers go on."""
        self._full = False
        waiting, self._writable = self._writable, None
        if waiting is not None and not waiting.called:
            waiting.callback(None)

    def _wake(self) -> None:
        waiting, self._readable = self._readable, None
        if waiting is not None and not waiting.called:
            waiting.callback(None)


@implementer(IPushProducer)
class _Writer:
    """Tells a ByteConnection whether its transport takes more."""

    def __init__(self, connection: ByteConnection) -> None:
        self._connection = connection

    def pauseProducing(self) -> None:
        self._connection.full()

    def resumeProducing(self) -> None:
        self._connection.room()

    def stopProducing(self) -> None:
        """Do nothing: the connection is lost, which the protocol is told next, and writers with it."""


class _Connections(Factory):
    noisy = False

    def __init__(self, what: str) -> None:
        self._what = what

    def buildProtocol(self, addr: IAddress | None) -> ByteConnection:
        return ByteConnection(self._what)


async def connected(endpoint: IStreamClientEndpoint, what: str) -> ByteConnection:
    """Connect. What the endpoint fails with is raised. :param what: what it leads to, for errors."""
    connection = await cancellable(endpoint.connect(_Connections(what)))
    assert isinstance(connection, ByteConnection)
    return connection
