"""What the streams of one connection have to send, and whose turn it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from h2.exceptions import StreamClosedError
from twisted.internet.defer import Deferred

from txgrpc.stream import Chunk, Stream

if TYPE_CHECKING:
    from txgrpc.connection import Connection

_FLUSH_AT = 64 * 1024
_TURN = 64  # DATA frames, after which others have the reactor: with its method each may cost 100 microseconds


class Sender:
    """Sends DATA as far as the peer's windows and the transport go; the rest waits in its stream's outbox.

    Streams that wait take turns, a frame each. While the transport has `paused` us nothing is sent. A
    peer that takes all we have does not get it in one turn of the reactor.
    """

    __slots__ = ("_blocked", "_connection", "_frames", "_h2", "_pumping", "_turn", "paused", "unflushed")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._h2 = connection.h2
        self._blocked: dict[int, Stream] = {}
        self._pumping = False
        self._frames = 0  # sent since others had a turn, at the most
        self._turn: Any = None
        self.paused = False
        self.unflushed = 0  # only the transport can tell when it has enough: it must hear of it soon

    def send(self, stream: Stream, data: bytes, end: bool) -> Deferred[None] | None:
        """Send `data` now (None), or in turn: the Deferred fires when all of it is handed over."""
        size = len(data)
        if not (stream.outbox or self.paused or self._frames >= _TURN) and size <= min(
            self._window(stream), self._h2.max_outbound_frame_size
        ):
            if self._send_data(stream, data, end):
                self._connection.sent(stream, end)
            if self.unflushed >= _FLUSH_AT:
                self._connection.flush_now()
            else:
                self._connection.flush()
            return None
        chunk = Chunk(memoryview(data), end)
        stream.outbox.append(chunk)
        self._blocked[stream.id] = stream
        self.pump()
        return chunk.sent

    def forget(self, stream: Stream) -> None:
        """The stream is over."""
        self._blocked.pop(stream.id, None)

    def clear(self) -> None:
        """All streams are over."""
        self._blocked.clear()
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.cancel()

    def pump(self) -> None:
        """Send what can be sent by now."""
        if self._pumping or self._turn is not None or not self._blocked:
            return  # when pumping: further up the stack somebody does, and comes by again
        self._pumping = True
        try:
            while self._round():
                self._connection.flush_now()
        finally:
            self._pumping = False
        if self.unflushed:
            self._connection.flush_now()
        if self._frames >= _TURN and self._blocked and not self.paused and self._connection.alive():
            self._turn = self._connection.reactor.callLater(0, self._next_turn)

    def _next_turn(self) -> None:
        self._turn = None
        self._frames = 0
        self.pump()

    def _round(self) -> bool:
        """A frame of each stream; whether any was sent."""
        sent = False
        for stream in list(self._blocked.values()):
            if self.paused or self._frames >= _TURN:
                return False
            if self._send_frame(stream):
                sent = True
                if self._blocked.pop(stream.id, None) is not None:
                    self._blocked[stream.id] = stream  # behind those whose turn is next
            if self.unflushed >= _FLUSH_AT:
                self._connection.flush_now()
        return sent

    def _send_frame(self, stream: Stream) -> bool:
        """Send the next frame of `stream`; False when it has to wait or has nothing."""
        if not stream.outbox:
            self.forget(stream)
            return False
        chunk = stream.outbox[0]
        left = len(chunk.data)
        size = min(left, self._window(stream), self._h2.max_outbound_frame_size)
        if size <= 0 < left:
            return False
        end = chunk.end and size == left
        if not self._send_data(stream, bytes(chunk.data[:size]), end):
            self.forget(stream)
            return False
        if size < left:
            chunk.data = chunk.data[size:]
            self._connection.sent(stream, end)
            return True
        stream.outbox.popleft()
        if not stream.outbox:
            self.forget(stream)
        self._connection.sent(stream, end)
        chunk.sent.callback(None)
        return True

    def _send_data(self, stream: Stream, data: bytes, end: bool) -> bool:
        try:
            self._h2.send_data(stream.id, data, end_stream=end)
        except StreamClosedError:
            return False  # reset by the peer, which we are about to hear of
        self.unflushed += len(data)
        self._frames += 1
        return True

    def _window(self, stream: Stream) -> int:
        try:
            return int(self._h2.local_flow_control_window(stream.id))
        except StreamClosedError:
            return 0
