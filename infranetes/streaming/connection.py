# SPDX-License-Identifier: Apache-2.0
"""One client's connection: the HTTP request, its upgrade, and then the session.

==========  =====================================  ============================
state       bytes that come in                     becomes
==========  =====================================  ============================
head        are HTTP/1.1 (framed by h11)           streams, or answered
streams     belong to the SPDY or WebSocket wire   ending when the session ends
answered    are dropped                            closed by the client or time
ending      are dropped                            closed by the client or time
==========  =====================================  ============================
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from http import HTTPStatus
from typing import Protocol

import h11
from twisted.internet import protocol
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from wsproto.utilities import generate_accept_token

from infranetes.streaming import protocols
from infranetes.streaming.binarywire import BinaryWire
from infranetes.streaming.channels import Flow
from infranetes.streaming.spdywire import SpdyWire
from infranetes.streaming.websocketwire import WebSocketWire
from infranetes_common.errors import InvalidArgument
from infranetes_common.transports import StreamTransport

#: Seconds within which the request's head must arrive, and for which an ended session awaits a close.
HEAD_TIMEOUT = 10.0
LINGER = 10.0
#: The most bytes of the request's head.
MAX_HEAD = 16 * 1024
#: Seconds for which one client's frames are handled before others have their turn.
TURN = 0.01


class Phase(enum.Enum):
    """The phases of a connection, by the table above."""

    HEAD = "head"
    STREAMS = "streams"
    OVER = "over"  # answered or ending


class Refused(Exception):
    """The request is answered with an HTTP error.

    :ivar status: 4xx. :ivar headers: more headers of the answer.
    """

    def __init__(self, status: HTTPStatus, reason: str, headers: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.headers = headers


class Sessions(Protocol):
    """The owner of connections, such as `infranetes.streaming.server.StreamingServer`."""

    def begin(self, connection: StreamingConnection, http: h11.Request) -> None:
        """Agree on an upgrade, and run the session.

        :raise Refused: the request is answered with an error instead."""

    def ended(self, connection: StreamingConnection) -> None:
        """Forget the connection, which is lost."""


class StreamingConnection(protocol.Protocol):
    """The server's end of one client's connection."""

    log = Logger()
    transport: StreamTransport

    def __init__(self, clock: IReactorTime, sessions: Sessions, idle_timeout: float) -> None:
        self._clock = clock
        self._sessions = sessions
        self._idle_timeout = idle_timeout
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self._phase = Phase.HEAD
        self._timer: IDelayedCall | None = None
        self._turn: IDelayedCall | None = None  # handles the rest of the input
        self._seen = 0.0
        self.wire: SpdyWire | WebSocketWire | BinaryWire | None = None
        self.session: Deferred[None] | None = None  # the session that uses the wire
        self.flow: Flow

    # Protocol

    def connectionMade(self) -> None:
        self.flow = Flow(self.transport, self._go_on)
        self._timer = self._clock.callLater(HEAD_TIMEOUT, self._abort)

    def dataReceived(self, data: bytes) -> None:
        if self._phase is Phase.HEAD:
            self._head_received(data)
        elif self._phase is Phase.STREAMS:
            self._feed(data)

    def connectionLost(self, reason: Failure | None = None) -> None:
        self._phase = Phase.OVER
        self._stop_timer()
        self.flow.connection_lost()
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        if self.wire is not None:
            self.wire.connection_lost()
        if self.session is not None:
            self.session.cancel()
        self._sessions.ended(self)

    # HTTP

    def _head_received(self, data: bytes) -> None:
        try:
            self._http.receive_data(data)
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            self._refuse(Refused(HTTPStatus.BAD_REQUEST, f"not an HTTP request: {error}"))
            return
        if event is h11.NEED_DATA:
            return
        if not isinstance(event, h11.Request):
            self._abort()
            return
        try:
            self._sessions.begin(self, event)
        except Refused as refused:
            self._refuse(refused)

    def _refuse(self, refused: Refused) -> None:
        body = refused.reason.encode() + b"\n"
        headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))]
        headers += [("Connection", "close"), *refused.headers]
        lines = [f"HTTP/1.1 {refused.status.value} {refused.status.phrase}"]
        lines += [f"{name}: {value}" for name, value in headers]
        self.transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        self._end()

    def upgrade(self, upgrade: str, headers: Sequence[tuple[str, str]]) -> None:
        """Answer 101. All bytes after that are the wire's."""
        fields = [("Upgrade", upgrade), ("Connection", "Upgrade"), *headers]
        lines = ["HTTP/1.1 101 Switching Protocols", *(f"{name}: {value}" for name, value in fields)]
        self.transport.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        self._phase = Phase.STREAMS
        self._stop_timer()
        self._seen = self._clock.seconds()
        self._timer = self._clock.callLater(self._idle_timeout, self._check_idle)

    def run(self, session: Deferred[None]) -> None:
        """Feed the wire with what came after the head, and end the connection when the session ends."""
        self.session = session
        session.addErrback(self._broke)
        session.addCallback(lambda _: self._end())
        early, _ = self._http.trailing_data
        if early and self._phase is Phase.STREAMS:
            self._feed(early)

    def _broke(self, failure: Failure) -> None:
        if self._phase is Phase.STREAMS:
            self.log.failure("a stream broke", failure)

    # Streams

    def write(self, data: bytes) -> None:
        """Write bytes of the wire."""
        self._seen = self._clock.seconds()
        self.transport.write(data)

    def _feed(self, data: bytes) -> None:
        self._seen = self._clock.seconds()
        assert self.wire is not None
        try:
            self.wire.receive(data)
        except InvalidArgument as error:
            self._cut_off(error)
        else:
            if self.flow.reading and self._turn is None:
                self._work()

    def _go_on(self) -> None:
        """Go on with what has come in: the flow allows it again."""
        if self._turn is None:
            self._turn = self._clock.callLater(0, self._work)

    def _work(self) -> None:
        """Handle what has come in as far as the flow and this turn allow. More is read only after that."""
        self._turn = None
        if self._phase is not Phase.STREAMS:
            return
        until = self._clock.seconds() + TURN
        assert self.wire is not None
        try:
            for _ in self.wire.work():
                if self._phase is not Phase.STREAMS or not self.flow.reading:
                    return
                if self._clock.seconds() >= until:
                    self.transport.pauseProducing()
                    self._go_on()
                    return
        except InvalidArgument as error:
            self._cut_off(error)
        else:
            if self.flow.reading:
                self.transport.resumeProducing()

    def _cut_off(self, error: InvalidArgument) -> None:
        self.log.info("a client of a stream is cut off: {error}", error=error)
        self._phase = Phase.OVER
        self._lose_connection(LINGER)

    def _end(self) -> None:
        """Read no more, flush what is written, and give the client a while to close."""
        if self._phase is Phase.OVER and self.flow.lost:
            return
        self._phase = Phase.OVER
        self._stop_timer()
        if self.wire is not None:
            self.wire.close()
        self.transport.resumeProducing()  # to notice the client's close, and to discard its further input
        if self.wire is None:
            self.transport.loseWriteConnection()
        self._timer = self._clock.callLater(LINGER, self._lose_connection, self._idle_timeout)

    def _lose_connection(self, patience: float) -> None:
        """Close once all is flushed, or after `patience` seconds: the client may never read."""
        self._stop_timer()
        self._timer = self._clock.callLater(patience, self._abort)
        self.transport.unregisterProducer()  # a paused producer would keep the transport open
        self.transport.loseConnection()

    def closed_by_client(self) -> None:
        """Close, since the client has said goodbye on the wire."""
        self._lose_connection(LINGER)

    def abort(self) -> None:
        """Drop the connection now."""
        self._abort()

    def _abort(self) -> None:
        self._phase = Phase.OVER
        self.transport.abortConnection()

    def _check_idle(self) -> None:
        left = self._seen + self._idle_timeout - self._clock.seconds()
        if left > 0:
            self._timer = self._clock.callLater(left, self._check_idle)
        else:
            self._lose_connection(LINGER)

    def _stop_timer(self) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None


def header_values(request: h11.Request, name: bytes) -> list[bytes]:
    """Return all values of a header; `name` in lower case."""
    return [value for key, value in request.headers if key == name]


def wants_websocket(request: h11.Request) -> bool:
    """Return whether the request is for a WebSocket, rather than SPDY/3.1.

    :raise Refused: it is neither.
    """
    connection = ",".join(v.decode("latin-1") for v in header_values(request, b"connection")).lower()
    upgrades = {v.lower() for v in protocols.offered(header_values(request, b"upgrade"))}
    if "upgrade" not in connection or not upgrades & {"websocket", "spdy/3.1"}:
        raise Refused(HTTPStatus.BAD_REQUEST, "an upgrade to SPDY/3.1 or websocket is required here")
    return "websocket" in upgrades


def accept_websocket(request: h11.Request, protocol: str) -> list[tuple[str, str]]:
    """Return the headers that accept a WebSocket (RFC 6455, 4.2.2).

    :raise Refused: the request is malformed.
    """
    keys = header_values(request, b"sec-websocket-key")
    if request.method != b"GET" or len(keys) != 1:
        raise Refused(HTTPStatus.BAD_REQUEST, "a WebSocket needs a GET with one Sec-WebSocket-Key")
    if header_values(request, b"sec-websocket-version") != [b"13"]:
        raise Refused(
            HTTPStatus.UPGRADE_REQUIRED,
            "version 13 of WebSocket is required",
            [("Sec-WebSocket-Version", "13")],
        )
    accepted = [("Sec-WebSocket-Accept", generate_accept_token(keys[0]).decode())]
    if protocol:
        accepted.append(("Sec-WebSocket-Protocol", protocol))
    return accepted
