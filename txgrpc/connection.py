# SPDX-License-Identifier: Apache-2.0
"""An HTTP/2 connection over a Twisted transport: the part that the server's and client's sides share.

======================  ====================================================================
phase                   what may happen
======================  ====================================================================
HANDSHAKE               until the peer's SETTINGS; no longer than ``handshake_timeout``
OPEN                    calls begin and end
DRAINING                GOAWAY was sent or received: calls end, none begins; then CLOSED
CLOSED                  nothing is read; the transport is closing or gone
======================  ====================================================================

HANDSHAKE -> OPEN -> DRAINING -> CLOSED; a connection may skip a phase, but never goes back.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from typing import Any, ClassVar, cast

from h2 import events
from h2.errors import ErrorCodes
from h2.exceptions import StreamClosedError
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IConsumer, IPushProducer, IReactorTime, ITCPTransport
from twisted.internet.protocol import Protocol
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from txgrpc.deadlines import Deadlines
from txgrpc.http2 import goaway, make_connection
from txgrpc.limits import Allowance, Budget, Limits
from txgrpc.metadata import Headers
from txgrpc.receiver import Misbehaviour, Receiver
from txgrpc.sender import Sender
from txgrpc.status import Disconnected
from txgrpc.stream import Stream

log = Logger()


class Phase(enum.IntEnum):
    """The phase of a connection's life; see the module's table."""

    HANDSHAKE = 0
    OPEN = 1
    DRAINING = 2
    CLOSED = 3


class ITransport(ITCPTransport, IPushProducer, IConsumer):
    """A connected transport, TLS or not, as Twisted has it."""


class _LostTransport:
    """A stand-in for a lost transport while the data that it delivered is still being handled."""

    def __init__(self, lost: ITransport) -> None:
        self.getPeer = lost.getPeer

    def write(self, data: bytes) -> None:
        """Drop `data`."""

    def _nothing(self) -> None:
        """Do nothing."""

    pauseProducing = resumeProducing = unregisterProducer = loseConnection = abortConnection = _nothing


@implementer(IPushProducer)
class Connection(Protocol):
    """Moves bytes between the transport, h2 and the streams; bounds the resources that the peer may use."""

    client_side: ClassVar[bool]
    transport: ITransport

    def __init__(self, reactor: IReactorTime, limits: Limits, keepalive: float | None) -> None:
        self.reactor = reactor
        self.limits = limits
        self.phase = Phase.HANDSHAKE
        self.closed = False  # the same as `phase`, but fast: checked for each frame
        self.streams: dict[int, Stream] = {}
        self.assembling = Budget(limits.max_assembling)
        self.reason = "the connection was closed"  # the reason that calls get when the connection is lost
        self.receiver = Receiver(self)
        self._deadlines = Deadlines(self, keepalive)
        self._unread = 0
        self._unacknowledged = 0
        now = reactor.seconds()
        self._resets = Allowance(max(1000, 2 * limits.max_concurrent_streams), 100, now)
        self._chatter = Allowance(1000, 100, now)

    # Transport

    def connectionMade(self) -> None:
        self.h2 = make_connection(self.client_side, self.limits)
        self.sender = Sender(self)
        with contextlib.suppress(AttributeError, OSError):  # the transport is not TCP
            self.transport.setTcpNoDelay(True)
        self.transport.registerProducer(self, True)
        self._deadlines.begin_handshake()
        self.flush()

    def dataReceived(self, data: bytes) -> None:
        if not self.closed:
            self.receiver.receive(data)

    def handle(self, received: list[events.Event]) -> None:
        """Handle h2's events, in order.

        :raise Misbehaviour: the peer must be disconnected."""
        handlers = self._handlers
        for event in received:
            handler = handlers.get(event.__class__)
            if handler is not None:
                handler(self, event)
                if self.closed:
                    return

    def connectionLost(self, reason: Failure | None = None) -> None:
        if self.receiver.lost(reason or Failure(ConnectionDone())):
            self.transport = cast(ITransport, _LostTransport(self.transport))
        else:
            self.end(reason)

    def end(self, reason: Failure | None) -> None:
        """End all calls: the transport is lost, and all that it brought is handled."""
        if reason is not None and not self.closed:
            self.reason = f"the connection was lost: {reason.getErrorMessage()}"
        self._be_closed()
        self._deadlines.stop()
        self.sender.clear()
        self._abandon(list(self.streams.values()), self.reason)
        self.gone()

    def gone(self) -> None:
        """Called when the transport is lost and every stream has been told."""

    def pauseProducing(self) -> None:
        self.sender.paused = True

    def resumeProducing(self) -> None:
        self._unread = 0
        self.sender.paused = False
        self.sender.pump()

    def stopProducing(self) -> None:
        self.sender.paused = True

    def flush(self) -> None:
        """Hand h2's output to the transport: at once, or after the frames that are being handled."""
        if not self.receiver.handling:
            self.flush_now()

    def flush_now(self) -> None:
        """Hand h2's output to the transport."""
        if self.closed:
            return
        self.sender.unflushed = 0
        data = self.h2.data_to_send()
        if not data:
            return
        if self.sender.paused:
            self._unread += len(data)
            if self._unread > self.limits.max_unread_output:
                # Not inside a method's own send: a coroutine can't be cancelled while it runs.
                self.reactor.callLater(
                    0, self.abort, "the peer sends requests, but does not read the answers"
                )
        self.transport.write(data)

    # Ending

    def _be_closed(self) -> None:
        self.phase = Phase.CLOSED
        self.closed = True

    def close(self, error_code: ErrorCodes, reason: str) -> None:
        """Send GOAWAY, flush and close. Calls that are still open end with `reason`."""
        if self.closed:
            return
        self.reason = reason
        self.flush()
        self._be_closed()
        last = self.h2.highest_inbound_stream_id
        self.transport.write(goaway(last, error_code, reason.encode()[:256]))
        self.transport.unregisterProducer()
        self.receiver.resume()  # TLS closes only after the peer's close_notify
        self.transport.loseConnection()
        self.receiver.stop()
        self.sender.clear()
        self._deadlines.begin_close()
        self._abandon(list(self.streams.values()), reason)

    def abort(self, reason: str) -> None:
        """Close at once: the peer does not listen anyway."""
        if self.closed:
            return
        self.reason = reason
        self._be_closed()
        self._deadlines.stop()
        self.receiver.stop()
        self.sender.clear()
        self.transport.unregisterProducer()
        self.transport.abortConnection()
        self._abandon(list(self.streams.values()), reason)

    def cut_off(self, what: str, error_code: ErrorCodes) -> None:
        """Close, since the peer misbehaves."""
        log.info("Cut off {peer}: {what}", peer=self.transport.getPeer(), what=what)
        self.receiver.handling = False
        self.close(error_code, f"the connection was closed: {what}")

    def _abandon(self, streams: list[Stream], reason: str) -> None:
        for stream in streams:
            self.streams.pop(stream.id, None)
            self.sender.forget(stream)
            stream.abandon(Disconnected(reason))
            stream.inbox.discard()

    def alive(self) -> bool:
        """Return whether the connection is not closed."""
        return not self.closed

    def wants_keepalive(self) -> bool:
        """Return whether a silent peer is worth a PING."""
        return True

    # For streams. h2 is ahead of us: it reads a few frames before we handle the event of the first one. So a
    # stream may be closed for h2 although we have not handled its RST_STREAM yet.

    def send_headers(self, stream_id: int, headers: Headers, end: bool) -> None:
        if not self.closed:
            try:
                self.h2.send_headers(stream_id, headers, end)
            except StreamClosedError:
                return
            self.flush()

    def send_reset(self, stream_id: int, error_code: ErrorCodes) -> None:
        if not self.closed:
            with contextlib.suppress(StreamClosedError):
                self.h2.reset_stream(stream_id, error_code)
            self.flush()

    def open_window(self, stream_id: int, credit: int) -> None:
        if not self.closed:
            with contextlib.suppress(StreamClosedError):
                self.h2.increment_flow_control_window(credit, stream_id)
            self.flush()

    def send_data(self, stream: Stream, data: bytes, end: bool) -> Deferred[None] | None:
        """Send as much as the window and the transport take; return a Deferred if the rest has to wait."""
        return self.sender.send(stream, data, end)

    def sent(self, stream: Stream, end: bool) -> None:
        """Note that a DATA frame of `stream` is handed over."""
        self._chatter.earn(1)
        if end:
            self.release(stream)

    def release(self, stream: Stream) -> None:
        """Forget a stream if both of its halves are over."""
        if stream.finished:
            if self.streams.pop(stream.id, None) is not None:
                self.stream_ended(stream)
            self.sender.forget(stream)
            stream.inbox.stop()

    def stream_ended(self, stream: Stream) -> None:
        """Called when there is one stream less."""

    # Events

    def _settings(self, event: events.RemoteSettingsChanged) -> None:
        self._tolerate(self._chatter, "SETTINGS", 10)
        if self.phase is Phase.HANDSHAKE:
            self.phase = Phase.OPEN
            self._deadlines.begin_keepalive()
            self.opened()
        else:
            self.settings_changed()
        self.sender.pump()

    def opened(self) -> None:
        """Called when the peer has begun HTTP/2 and sent its settings."""

    def settings_changed(self) -> None:
        """Called when the peer has sent other settings."""

    def _window(self, event: events.WindowUpdated) -> None:
        self._tolerate(self._chatter, "WINDOW_UPDATE")
        self.sender.pump()

    def _ping(self, event: events.PingReceived) -> None:
        self._tolerate(self._chatter, "PING")

    def _pong(self, event: events.PingAckReceived) -> None:
        self._tolerate(self._chatter, "PING")
        self.pong(event.ping_data)

    def pong(self, data: bytes) -> None:
        """Called when the peer answers one of our PINGs."""

    def _noise(self, event: events.Event) -> None:
        self._tolerate(self._chatter, "needless")

    def _data(self, event: events.DataReceived) -> None:
        length = event.flow_controlled_length
        if event.data:
            self._chatter.earn(2)
        elif event.stream_ended is None:
            self._tolerate(self._chatter, "empty DATA")
        # The connection's window only limits the bytes in flight. A call that does not take its messages must
        # not stop the others.
        self._unacknowledged += length
        if self._unacknowledged >= self.limits.connection_window // 2:
            self.h2.increment_flow_control_window(self._unacknowledged)
            self._unacknowledged = 0
        stream = self.streams.get(event.stream_id)
        if stream is not None:
            stream.data_received(event.data, length)

    def _half_closed(self, event: events.StreamEnded) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is not None:
            stream.end_received()

    def _reset(self, event: events.StreamReset) -> None:
        # This includes the resets with which h2 answers wrong frames: causing those is as bad as sending
        # them.
        self.wasted()
        stream = self.streams.pop(event.stream_id, None)
        if stream is not None:
            self.sender.forget(stream)
            self.stream_ended(stream)
            stream.was_reset(int(event.error_code))
            stream.inbox.discard()

    def _goaway(self, event: events.ConnectionTerminated) -> None:
        self._tolerate(self._chatter, "GOAWAY")
        code, last = int(event.error_code or 0), event.last_stream_id or 0
        self.goaway_received(code, last, event.additional_data or b"")

    def goaway_received(self, error_code: int, last_stream_id: int, reason: bytes) -> None:
        """Called when the peer takes no further calls."""

    def _request(self, event: events.RequestReceived) -> None:
        self._chatter.earn(2)
        self.request_received(event.stream_id, event.headers)

    def request_received(self, stream_id: int, headers: Headers) -> None:
        """Called when a call begins."""

    def _response(self, event: events.ResponseReceived) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is not None:
            stream.response_received(event.headers, event.stream_ended is not None)

    def _trailers(self, event: events.TrailersReceived) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is not None:
            stream.trailers_received(event.headers)

    def wasted(self) -> None:
        """Note that the peer began a call only to spoil it.

        :raise Misbehaviour: it did so too often.
        """
        self._tolerate(self._resets, "RST_STREAM")

    def worked(self) -> None:
        """Note that a call has run to its end, as an honest peer's do."""
        self._resets.earn(1)

    def _tolerate(self, allowance: Allowance, what: str, cost: int = 1) -> None:
        for _ in range(cost):
            if not allowance.spend(self.receiver.heard):
                raise Misbehaviour(f"too many {what} frames")

    _handlers: ClassVar[dict[type, Callable[[Connection, Any], None]]] = {  # Any: the event class of each key
        events.RequestReceived: _request,
        events.ResponseReceived: _response,
        events.TrailersReceived: _trailers,
        events.DataReceived: _data,
        events.StreamEnded: _half_closed,
        events.StreamReset: _reset,
        events.WindowUpdated: _window,
        events.RemoteSettingsChanged: _settings,
        events.PingReceived: _ping,
        events.PingAckReceived: _pong,
        events.ConnectionTerminated: _goaway,
        events.PriorityUpdated: _noise,
        events.UnknownFrameReceived: _noise,
        events.SettingsAcknowledged: _noise,
    }
