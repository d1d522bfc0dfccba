"""One TCP connection to a port of the pod."""

from __future__ import annotations

from typing import Any

from twisted.internet.endpoints import TCP4ClientEndpoint, TCP6ClientEndpoint, connectProtocol
from twisted.internet.error import ConnectError, ConnectionDone
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Protocol
from zope.interface import implementer

from infranetes_common.errors import Unavailable
from vmserver.containers.sessions import Output, Room

CONNECT_SECONDS = 10.0


@implementer(IHalfCloseableProtocol)
class Connection(Protocol):
    """The connection. :ivar output: what the other side writes, until it writes no more."""

    transport: Any

    def __init__(self) -> None:
        self._room = Room()
        self._finished = False
        self._lost = False
        self.output = Output(self._pause, self._resume)

    def connectionMade(self) -> None:
        self.transport.setTcpNoDelay(True)
        self.transport.registerProducer(self._room, True)

    def dataReceived(self, data: bytes) -> None:
        self.output.put("data", data)

    def readConnectionLost(self) -> None:
        self.output.end()

    def writeConnectionLost(self) -> None:
        self._room.stopProducing()

    def connectionLost(self, reason: Any = None) -> None:
        self._lost = True
        self._room.stopProducing()
        if reason is not None and not reason.check(ConnectionDone):
            self.output.fail(Unavailable(f"the connection broke: {reason.getErrorMessage()}"))
        self.output.end()

    def _pause(self) -> None:
        if not self._lost:
            self.transport.pauseProducing()

    def _resume(self) -> None:
        if not self._lost:
            self.transport.resumeProducing()

    async def write(self, data: bytes) -> None:
        """Write, and wait until more may follow. After the end: dropped."""
        if not self._finished and not self._lost:
            self.transport.write(data)
            await self._room.wait()

    def finish(self) -> None:
        """Write no more. Twice is once."""
        if not self._finished and not self._lost:
            self._finished = True
            self.transport.unregisterProducer()
            self.transport.loseWriteConnection()

    def close(self) -> None:
        """End both directions: what was written is sent, or the connection is reset. Twice is once."""
        if self._lost:
            return
        if self._finished:
            self.transport.loseConnection()
        else:
            self.transport.abortConnection()


async def connect(reactor: Any, port: int) -> Connection:
    """A connection to what listens on this machine's `port`; containers share the machine's network.

    :raise Unavailable: nothing listens there, or it does not answer.
    """
    refusals = []
    for endpoint in (TCP4ClientEndpoint, TCP6ClientEndpoint):
        host = "127.0.0.1" if endpoint is TCP4ClientEndpoint else "::1"
        try:
            connection: Connection = await connectProtocol(
                endpoint(reactor, host, port, timeout=CONNECT_SECONDS), Connection()
            )
        except ConnectError as error:
            refusals.append(f"{host}: {error}")
        else:
            return connection
    raise Unavailable(f"nothing in the pod listens on port {port} ({'; '.join(refusals)})")
