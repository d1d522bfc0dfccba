"""An HTTP/2 connection over a Twisted transport: what the server's and the client's side have in common.

======================  ====================================================================
phase                   what may happen
======================  ====================================================================
HANDSHAKE               until the peer's SETTINGS; no longer than ``handshake_timeout``
OPEN                    calls begin and end
DRAINING                GOAWAY was sent or received: calls end, none begins; then CLOSED
CLOSED                  nothing is read; the transport is closing or gone
======================  ====================================================================

HANDSHAKE -> OPEN -> DRAINING -> CLOSED; any of them may be skipped, none is gone back to.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from typing import Any, ClassVar

from h2 import events
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError, StreamClosedError
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IPushProducer
from twisted.internet.protocol import Protocol
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from txgrpc.http2 import FrameGuard, OversizedFrame, goaway, make_connection
from txgrpc.limits import Allowance, Budget, Limits
from txgrpc.metadata import Headers
from txgrpc.sender import Sender
from txgrpc.status import Code, GrpcError
from txgrpc.stream import Stream

log = Logger()

_PING = b"txgrpc\0\0"
_TURN = 0.01  # seconds after which what arrived has to wait for others


class Phase(enum.IntEnum):
    """Where a connection is; see the module's table."""

    HANDSHAKE = 0
    OPEN = 1
    DRAINING = 2
    CLOSED = 3


class Misbehaviour(Exception):
    """The peer does what no honest one does: it is cut off."""


class _LostTransport:
    """Stands for a transport that is no more while what it brought is still handled."""

    def __init__(self, lost: Any) -> None:
        self.getPeer = lost.getPeer

    def write(self, data: bytes) -> None:
        """Nobody is there to read it."""

    def _nothing(self) -> None:
        """There is nothing to do it to."""

    pauseProducing = resumeProducing = unregisterProducer = loseConnection = abortConnection = _nothing


@implementer(IPushProducer)
class Connection(Protocol):
    """Moves bytes between the transport, h2 and the streams; bounds what the peer may cost."""

    client_side: ClassVar[bool]
    transport: Any

    def __init__(self, reactor: Any, limits: Limits, keepalive: float | None) -> None:
        self.reactor = reactor
        self.limits = limits
        self.keepalive = keepalive
        self.phase = Phase.HANDSHAKE
        self.streams: dict[int, Stream] = {}
        self.assembling = Budget(limits.max_assembling)
        self.reason = "the connection was closed"  # what calls are told when it is lost
        self._batch = False
        self._backlog = b""  # arrived, and waits for another turn of the reactor
        self._halted = False  # the transport does not read, for the backlog
        self._turn: Any = None
        self._lost: Failure | None = None  # the connection is, and this why; the backlog goes first
        self._unread = 0
        self._unacknowledged = 0
        self._timer: Any = None
        self._pinged: float | None = None
        now = reactor.seconds()
        self._heard = now
        self._resets = Allowance(max(1000, 2 * limits.max_concurrent_streams), 100, now)
        self._chatter = Allowance(1000, 100, now)

    # Transport

    def connectionMade(self) -> None:
        self.h2 = make_connection(self.client_side, self.limits)
        self.sender = Sender(self)
        self._guard = FrameGuard(self.client_side)
        with contextlib.suppress(AttributeError, OSError):  # not TCP
            self.transport.setTcpNoDelay(True)
        self.transport.registerProducer(self, True)
        self._timer = self.reactor.callLater(self.limits.handshake_timeout, self._handshake_late)
        self.flush()

    def dataReceived(self, data: bytes) -> None:
        if self.phase is Phase.CLOSED:
            return
        self._heard = self.reactor.seconds()
        if self._backlog:
            self._backlog += data
        else:
            self._take(data)

    def _take(self, data: bytes) -> None:
        """Handle `data`, as far as it goes in one turn of the reactor; the rest is the backlog, and
        until that is done nothing more is read."""
        until = self.reactor.seconds() + _TURN
        at, size = 0, len(data)
        self._batch = True
        try:
            while at < size and self.phase is not Phase.CLOSED:
                at = self._take_frames(data, at)
                if at < size and self.reactor.seconds() >= until:
                    break
        finally:
            self._batch = False
        self.flush()
        if self.phase is Phase.CLOSED:
            return
        if at < size:
            self._backlog = data[at:]
            if not self._halted:
                self._halted = True
                self.transport.pauseProducing()
            self._turn = self.reactor.callLater(0, self._go_on)
        elif self._halted:
            self._halted = False
            self.transport.resumeProducing()

    def _take_frames(self, data: bytes, at: int) -> int:
        """Handle the next few frames of `data`, from `at` on; where the others begin."""
        try:
            end = self._guard.check(data, at)
            received = self.h2.receive_data(data if end - at == len(data) else data[at:end])
        except OversizedFrame as error:
            self._cut_off(str(error), ErrorCodes.FRAME_SIZE_ERROR)
            return len(data)
        except ProtocolError as error:
            code = getattr(error, "error_code", ErrorCodes.PROTOCOL_ERROR)
            self._cut_off(str(error) or type(error).__name__, code)
            return len(data)
        try:
            self._handle(received)
        except Misbehaviour as error:
            self._cut_off(str(error), ErrorCodes.ENHANCE_YOUR_CALM)
        return end

    def _go_on(self) -> None:
        """Another turn for the backlog; behind it comes the loss of the connection."""
        self._turn = None
        data, self._backlog = self._backlog, b""
        try:
            self._take(data)
        except Exception:
            log.failure("What {peer} sent can't be handled", peer=self.transport.getPeer())
            self.abort("the connection failed")
        lost, self._lost = self._lost, None
        if lost is not None:
            if self._backlog:
                self._lost = lost
            else:
                self._end(lost)

    def _drop_backlog(self) -> None:
        """What was not handled yet never will be."""
        self._backlog = b""
        if self._turn is not None and self._lost is None:
            self._turn.cancel()
            self._turn = None

    def _handle(self, received: list[events.Event]) -> None:
        handlers = self._handlers
        for event in received:
            handler = handlers.get(event.__class__)
            if handler is not None:
                handler(self, event)
                if self.phase is Phase.CLOSED:
                    return

    def connectionLost(self, reason: Failure | None = None) -> None:
        if self._backlog:  # it was sent before
            self._lost = reason or Failure(ConnectionDone())
            self.transport = _LostTransport(self.transport)
        else:
            self._end(reason)

    def _end(self, reason: Failure | None) -> None:
        if reason is not None and self.phase is not Phase.CLOSED:
            self.reason = f"the connection was lost: {reason.getErrorMessage()}"
        self.phase = Phase.CLOSED
        self._stop_timer()
        self.sender.clear()
        self._abandon(list(self.streams.values()), self.reason)
        self.gone()

    def gone(self) -> None:
        """The transport is no more and every stream has been told."""

    def pauseProducing(self) -> None:
        self.sender.paused = True

    def resumeProducing(self) -> None:
        self._unread = 0
        self.sender.paused = False
        self.sender.pump()

    def stopProducing(self) -> None:
        self.sender.paused = True

    def flush(self) -> None:
        """Hand h2's output to the transport, once for all that one received chunk has caused."""
        if not self._batch:
            self.flush_now()

    def flush_now(self) -> None:
        """Hand h2's output to the transport."""
        if self.phase is Phase.CLOSED:
            return
        self.sender.unflushed = 0
        data = self.h2.data_to_send()
        if not data:
            return
        if self.sender.paused:
            self._unread += len(data)
            if self._unread > self.limits.max_unread_output:
                # Not from within a method's own send: its coroutine can't be cancelled while it runs.
                self.reactor.callLater(0, self.abort, "the peer asks, but does not read the answers")
        self.transport.write(data)

    # Ending

    def close(self, error_code: ErrorCodes, reason: str) -> None:
        """Say GOAWAY, flush, and close; whoever still has a call here is told `reason`."""
        if self.phase is Phase.CLOSED:
            return
        self.reason = reason
        self.flush()
        self.phase = Phase.CLOSED
        last = self.h2.highest_inbound_stream_id
        self.transport.write(goaway(last, error_code, reason.encode()[:256]))
        self.transport.unregisterProducer()
        if self._halted:  # TLS waits for the peer's word
            self._halted = False
            self.transport.resumeProducing()
        self.transport.loseConnection()
        self._stop_timer()
        self._drop_backlog()
        self.sender.clear()
        self._timer = self.reactor.callLater(self.limits.close_timeout, self._abort)
        self._abandon(list(self.streams.values()), reason)

    def abort(self, reason: str) -> None:
        """Close at once: the peer does not listen anyway."""
        if self.phase is Phase.CLOSED:
            return
        self.reason = reason
        self.phase = Phase.CLOSED
        self._stop_timer()
        self._drop_backlog()
        self.sender.clear()
        self.transport.unregisterProducer()
        self._abort()
        self._abandon(list(self.streams.values()), reason)

    def _abort(self) -> None:
        self._timer = None
        self.transport.abortConnection()

    def _cut_off(self, what: str, error_code: ErrorCodes) -> None:
        log.info("Cut off {peer}: {what}", peer=self.transport.getPeer(), what=what)
        self._batch = False
        self.close(error_code, f"the connection was closed: {what}")

    def _abandon(self, streams: list[Stream], reason: str) -> None:
        for stream in streams:
            self.streams.pop(stream.id, None)
            self.sender.forget(stream)
            stream.abandon(GrpcError(Code.UNAVAILABLE, reason))
            stream.inbox.discard()

    # Timer: the handshake's end, then keepalive

    def _handshake_late(self) -> None:
        self._timer = None
        self.abort(f"the peer did not begin HTTP/2 within {self.limits.handshake_timeout:g} s")

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _keep_alive(self) -> None:
        self._timer = None
        keepalive = self.keepalive
        if keepalive is None or self.phase is Phase.CLOSED:
            return
        now = self.reactor.seconds()
        if self._pinged is not None and self._heard < self._pinged:
            self.abort(f"the peer did not answer a PING within {self.limits.keepalive_timeout:g} s")
            return
        self._pinged = None
        wait = self._heard + keepalive - now
        if wait <= 0:
            wait = keepalive
            if self.wants_keepalive():
                self._pinged = now
                self.h2.ping(_PING)
                self.flush()
                wait = self.limits.keepalive_timeout
        if self.alive():
            self._timer = self.reactor.callLater(wait, self._keep_alive)

    def alive(self) -> bool:
        """Whether the connection is not closed (yet)."""
        return self.phase is not Phase.CLOSED

    def wants_keepalive(self) -> bool:
        """Whether a silent peer is worth a PING."""
        return True

    # What streams ask for. h2 is ahead of us: it has read a few frames before we handle the first
    # one's event, so that a stream may be closed for it whose RST_STREAM we have yet to hear of.

    def send_headers(self, stream_id: int, headers: Headers, end: bool) -> None:
        if self.phase is not Phase.CLOSED:
            with contextlib.suppress(StreamClosedError):
                self.h2.send_headers(stream_id, headers, end_stream=end)
            self.flush()

    def send_reset(self, stream_id: int, error_code: ErrorCodes) -> None:
        if self.phase is not Phase.CLOSED:
            with contextlib.suppress(StreamClosedError):
                self.h2.reset_stream(stream_id, error_code)
            self.flush()

    def open_window(self, stream_id: int, credit: int) -> None:
        if self.phase is not Phase.CLOSED:
            with contextlib.suppress(StreamClosedError):
                self.h2.increment_flow_control_window(credit, stream_id)
            self.flush()

    def send_data(self, stream: Stream, data: bytes, end: bool) -> Deferred[None] | None:
        """Send what the window and the transport take; a Deferred when some of it has to wait."""
        return self.sender.send(stream, data, end)

    def sent(self, stream: Stream, end: bool) -> None:
        """A DATA frame of `stream` is handed over."""
        self._chatter.earn(1)
        if end:
            self.release(stream)

    def release(self, stream: Stream) -> None:
        """Forget a stream whose halves are both over."""
        if stream.finished:
            if self.streams.pop(stream.id, None) is not None:
                self.stream_ended(stream)
            self.sender.forget(stream)
            stream.inbox.stop()

    def stream_ended(self, stream: Stream) -> None:
        """There is one stream less."""

    # Events

    def _settings(self, event: Any) -> None:
        self._tolerate(self._chatter, "SETTINGS", 10)
        if self.phase is Phase.HANDSHAKE:
            self.phase = Phase.OPEN
            self._stop_timer()
            if self.keepalive is not None:
                self._timer = self.reactor.callLater(self.keepalive, self._keep_alive)
            self.opened()
        self.sender.pump()

    def opened(self) -> None:
        """The peer speaks HTTP/2 and has said what it allows."""

    def _window(self, event: Any) -> None:
        self._tolerate(self._chatter, "WINDOW_UPDATE")
        self.sender.pump()

    def _ping(self, event: Any) -> None:
        self._tolerate(self._chatter, "PING")

    def _pong(self, event: Any) -> None:
        self._tolerate(self._chatter, "PING")
        self.pong(event.ping_data)

    def pong(self, data: bytes) -> None:
        """The peer answers one of our PINGs."""

    def _noise(self, event: Any) -> None:
        self._tolerate(self._chatter, "needless")

    def _data(self, event: Any) -> None:
        length = event.flow_controlled_length
        if event.data:
            self._chatter.earn(2)
        elif event.stream_ended is None:
            self._tolerate(self._chatter, "empty DATA")
        # The connection's window only bounds what is under way: a call that nobody reads must not
        # stop the others.
        self._unacknowledged += length
        if self._unacknowledged >= self.limits.connection_window // 2:
            self.h2.increment_flow_control_window(self._unacknowledged)
            self._unacknowledged = 0
        stream = self.streams.get(event.stream_id)
        if stream is not None:
            stream.data_received(event.data, length)

    def _half_closed(self, event: Any) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is not None:
            stream.end_received()

    def _reset(self, event: Any) -> None:
        # Also those that h2 makes of a peer's wrong frames: whoever provokes resets means the same.
        self.wasted()
        stream = self.streams.pop(event.stream_id, None)
        if stream is not None:
            self.sender.forget(stream)
            self.stream_ended(stream)
            stream.was_reset(int(event.error_code))
            stream.inbox.discard()

    def _goaway(self, event: Any) -> None:
        self._tolerate(self._chatter, "GOAWAY")
        self.goaway_received(int(event.error_code), event.last_stream_id, event.additional_data or b"")

    def goaway_received(self, error_code: int, last_stream_id: int, reason: bytes) -> None:
        """The peer takes no further calls."""

    def _request(self, event: Any) -> None:
        self._chatter.earn(2)
        self.request_received(event.stream_id, event.headers)

    def request_received(self, stream_id: int, headers: Headers) -> None:
        """A call begins."""

    def _response(self, event: Any) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is not None:
            self.response_received(stream, event.headers, event.stream_ended is not None)

    def response_received(self, stream: Stream, headers: Headers, ended: bool) -> None:
        """The first headers of a response."""

    def _trailers(self, event: Any) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is not None:
            self.trailers_received(stream, event.headers)

    def trailers_received(self, stream: Stream, headers: Headers) -> None:
        """The last headers of a response."""

    def wasted(self) -> None:
        """The peer began a call only to spoil it.

        :raise Misbehaviour: once too often.
        """
        self._tolerate(self._resets, "RST_STREAM")

    def worked(self) -> None:
        """A call has run to its end: the peer is one to work with."""
        self._resets.earn(1)

    def _tolerate(self, allowance: Allowance, what: str, cost: int = 1) -> None:
        for _ in range(cost):
            if not allowance.spend(self._heard):
                raise Misbehaviour(f"too many {what} frames")

    _handlers: ClassVar[dict[type, Callable[[Connection, Any], None]]] = {
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
