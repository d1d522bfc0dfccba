# SPDX-License-Identifier: Apache-2.0
"""Connections from the node to a guest's ports, as our agent's PortForward call has them."""

from __future__ import annotations

from collections.abc import AsyncIterator

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import HostnameEndpoint
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IAddress, IConsumer, IPushProducer, ITCPTransport
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes.machines.agentless.sessions import OpenedLater
from infranetes.machines.sessions import PortForwardCall
from infranetes_common.concurrency import cancellable
from infranetes_common.errors import InvalidArgument, Unavailable
from infranetes_common.reactors import IReactor
from infranetes_common.wire import vmserver

CONNECT_SECONDS = 10.0
AHEAD_BYTES = 256 * 1024  # received and not yet read, before the guest has to wait


class TcpConnection(ITCPTransport, IConsumer, IPushProducer):
    """What Twisted's TCP transports are."""


class GuestPort(Protocol):
    """One connection to a port of the guest: an `AgentCall` whose first message has been sent."""

    transport: TcpConnection

    def __init__(self) -> None:
        self._received: list[bytes] = []
        self._size = 0
        self._paused = False
        self._ended = False
        self._error: Exception | None = None
        self._readable: Deferred[None] | None = None
        self._writable: Deferred[None] | None = None
        self._full = False

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
            self._error = Unavailable(f"the connection to the guest's port was lost: {reason.value}")
        self._wake()
        self.room()

    async def send(self, request: vmserver.PortForwardInput) -> None:
        """Send bytes to the guest; returns when more may follow."""
        if self._ended:
            raise self._error or Unavailable("the guest has closed the connection")
        self.transport.write(request.data)
        if self._full:
            self._writable = Deferred()
            await self._writable

    async def done_sending(self) -> None:
        """Close the writing half."""
        if not self._ended:
            self.transport.loseWriteConnection()

    def cancel(self) -> None:
        """Close the connection. Idempotent."""
        if not self._ended:
            self.transport.abortConnection()

    async def __aiter__(self) -> AsyncIterator[vmserver.PortForwardOutput]:
        while True:
            while self._received:
                data = self._received.pop(0)
                self._size -= len(data)
                if self._paused and self._size <= AHEAD_BYTES // 2 and not self._ended:
                    self._paused = False
                    self.transport.resumeProducing()
                yield vmserver.PortForwardOutput(data=data)
            if self._ended:
                if self._error is not None:
                    raise self._error
                return
            self._readable = Deferred()
            await self._readable

    def full(self) -> None:
        """Have the next sender wait: the guest does not take what was sent."""
        self._full = True

    def room(self) -> None:
        """Have senders go on."""
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
    """Tells a GuestPort whether its transport takes more."""

    def __init__(self, port: GuestPort) -> None:
        self._port = port

    def pauseProducing(self) -> None:
        self._port.full()

    def resumeProducing(self) -> None:
        self._port.room()

    def stopProducing(self) -> None:
        self._port.room()


class _Ports(Factory):
    noisy = False

    def buildProtocol(self, addr: IAddress | None) -> GuestPort:
        return GuestPort()


def forwarded(reactor: IReactor, host: str) -> PortForwardCall:
    """Return a call that connects to the port of `host` that its first message names.

    It fails with Unavailable if nothing listens there."""

    async def opened(first: vmserver.PortForwardInput) -> PortForwardCall:
        if not 0 < first.port < 65536:
            raise InvalidArgument(f"{first.port} is no port: 1 to 65535 are")
        endpoint = HostnameEndpoint(reactor, host, first.port, timeout=CONNECT_SECONDS)
        try:
            port = await cancellable(endpoint.connect(_Ports()))
        except Exception as error:
            raise Unavailable(f"port {first.port} of the guest can't be reached: {error}") from None
        assert isinstance(port, GuestPort)
        return port

    return OpenedLater(opened)
