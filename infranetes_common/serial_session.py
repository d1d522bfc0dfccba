# SPDX-License-Identifier: Apache-2.0
"""A session of `serial_link` as a connection: its transport, for either end, and the end that opens it.

ASKING    the opener has sent its open, and drops what comes until it is answered
OPEN      the protocol has the transport, and gets the session's bytes
CLOSED    the protocol is told the end, and what still comes is dropped
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import (
    IAddress,
    IDelayedCall,
    IProducer,
    IProtocol,
    IProtocolFactory,
    IReactorTime,
)
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes_common import serial_link
from infranetes_common.errors import DeadlineExceeded, Unavailable
from infranetes_common.serial_link import Data, Decoder, Opened
from infranetes_common.transports import ByteTransport

OPEN_SECONDS = 10.0
FIRST_PAUSE = 0.5  # before it is asked again, with filler; each further pause is twice as long
MOST_UNASKED = 16 << 20  # bytes read before the answer: what a former session has left on its way is less


@implementer(IAddress)
@attrs.frozen
class SerialAddress:
    """The other end of a port, which has no address: only the hypervisor leads there."""

    name: str


@implementer(ByteTransport)
class SessionTransport:
    """The transport of one session, over the transport of the port.

    :param peer: the other end, for people.
    :param close: called when the protocol ends the session, and again if it aborts after that; `lost` has to
        follow, from another turn of the reactor. It is told whether what was written may be dropped.
    :ivar open: whether the protocol may still write.
    """

    def __init__(
        self, below: ByteTransport, session: bytes, peer: SerialAddress, close: Callable[[bool], None]
    ) -> None:
        self.session = session
        self.open = True
        self._below = below
        self._peer = peer
        self._close = close
        self._protocol: IProtocol | None = None  # None: it was told the end
        self._paused = False
        self._held: deque[bytes] = deque()  # came with what was read last before the pause
        self._producing = False

    def serve(self, protocol: IProtocol) -> None:
        """Connect the protocol."""
        self._protocol = protocol
        protocol.makeConnection(self)

    def received(self, payload: bytes) -> None:
        """Hand over bytes of the session, as soon as the protocol takes them."""
        if self._paused:
            self._held.append(payload)
        elif self._protocol is not None:
            self._protocol.dataReceived(payload)

    def lost(self, reason: Failure) -> None:
        """Tell the protocol that the session is over, after what has come of it. Idempotent."""
        protocol, self._protocol = self._protocol, None
        if protocol is None:
            return
        self.unregisterProducer()
        while self._held and self.open:
            protocol.dataReceived(self._held.popleft())
        self.open = False
        if self._paused:
            self._paused = False
            self._below.resumeProducing()
        protocol.connectionLost(reason)

    # ITransport

    def write(self, data: bytes) -> None:
        if self.open and data:
            self._below.writeSequence(serial_link.records(self.session, data))

    def writeSequence(self, data: Iterable[bytes]) -> None:
        self.write(b"".join(data))

    def loseConnection(self) -> None:
        self._end(False)

    def abortConnection(self) -> None:
        self._end(True)

    def getPeer(self) -> SerialAddress:
        return self._peer

    def getHost(self) -> SerialAddress:
        return self._peer

    def _end(self, abort: bool) -> None:
        if self.open:
            self.unregisterProducer()
            if not abort:
                self._below.write(serial_link.RESET)
            self.open = False
            self._held.clear()
            self._close(abort)
        elif abort and self._protocol is not None:  # the other end does not take the rest
            self._close(True)

    # IConsumer: the port's transport tells the producer when it has room

    def registerProducer(self, producer: IProducer, streaming: bool) -> None:
        if not streaming:
            raise ValueError("a session takes push producers only")
        if self.open:
            self._producing = True
            self._below.registerProducer(producer, True)
        else:
            producer.stopProducing()

    def unregisterProducer(self) -> None:
        if self._producing:
            self._producing = False
            self._below.unregisterProducer()

    # IPushProducer

    def pauseProducing(self) -> None:
        if self._protocol is not None:
            self._paused = True
            self._below.pauseProducing()

    def resumeProducing(self) -> None:
        if not self._paused:
            return
        self._paused = False
        while self._held and self._protocol is not None:
            self._protocol.dataReceived(self._held.popleft())
            if self._paused:
                return
        if self._protocol is not None:
            self._below.resumeProducing()

    def stopProducing(self) -> None:
        self.loseConnection()


class SessionOpener(Protocol):
    """Opens a session on its connection to a port, and is that session's end. The connection ends with it.

    :param factory: makes the session's protocol.
    :ivar opened: fires with that protocol once the other end has answered. Fails with Unavailable where the
        connection is lost before, and with DeadlineExceeded; the connection is closed then, as it is when
        this is cancelled.
    """

    transport: ByteTransport | None

    def __init__(self, reactor: IReactorTime, factory: IProtocolFactory, peer: SerialAddress) -> None:
        self.opened: Deferred[IProtocol] = Deferred(lambda _: self._fail(CancelledError()))
        self._reactor = reactor
        self._factory = factory
        self._peer = peer
        self._session = serial_link.new_session()
        self._decoder = Decoder()
        self._unasked = 0
        self._made: SessionTransport | None = None
        self._timers: list[IDelayedCall] = []

    def connectionMade(self) -> None:
        self._timers.append(self._reactor.callLater(OPEN_SECONDS, self._too_late))
        self._ask(b"", FIRST_PAUSE)

    def _ask(self, filler: bytes, pause: float) -> None:
        assert self.transport is not None
        self.transport.write(filler + serial_link.opening(self._session))
        again = self._reactor.callLater(pause, self._ask, serial_link.FILLER, 2 * pause)
        self._timers[1:] = [again]

    def _too_late(self) -> None:
        self._fail(DeadlineExceeded(f"{self._peer.name} does not answer within {OPEN_SECONDS:g} s"))

    def dataReceived(self, data: bytes) -> None:
        if self._made is None:
            if self.opened.called:
                return  # it has failed, and the connection is being closed
            self._unasked += len(data)
        for event in self._decoder.events(data):
            if self._made is None:
                if event == Opened(self._session):
                    self._begin()
            elif isinstance(event, Data):
                self._made.received(event.payload)
            elif not isinstance(event, Opened):
                self._over(event)
                return
        if self._made is None and self._unasked > MOST_UNASKED:
            self._fail(Unavailable(f"{self._peer.name} sends what nobody has asked for"))

    def _begin(self) -> None:
        assert self.transport is not None
        self._stop_timers()
        protocol = self._factory.buildProtocol(self._peer)
        if protocol is None:
            self._fail(Unavailable(f"{self._peer.name}: no connection is wanted any more"))
            return
        self._made = SessionTransport(self.transport, self._session, self._peer, self._close)
        self._made.serve(protocol)
        self.opened.callback(protocol)

    def _over(self, event: serial_link.Event) -> None:
        """Handle the session's end at the other end."""
        assert self._made is not None
        assert self.transport is not None
        done = isinstance(event, serial_link.Reset)
        self.transport.abortConnection()
        self._made.lost(Failure(ConnectionDone() if done else ConnectionLost("the session was cut")))

    def _close(self, abort: bool) -> None:
        assert self.transport is not None
        if abort:
            self.transport.abortConnection()
        else:
            self.transport.loseConnection()

    def _fail(self, error: Exception) -> None:
        self._stop_timers()
        if not self.opened.called:
            self.opened.errback(error)
        if self.transport is not None:
            self.transport.abortConnection()

    def _stop_timers(self) -> None:
        timers, self._timers = self._timers, []
        for timer in timers:
            if timer.active():
                timer.cancel()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._stop_timers()
        if self._made is not None:
            self._made.lost(reason)
        elif not self.opened.called:
            self.opened.errback(Unavailable(f"the connection to {self._peer.name} was lost"))
