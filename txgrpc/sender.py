# SPDX-License-Identifier: Apache-2.0
"""Sending for all streams of one connection, which take turns."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from h2.exceptions import StreamClosedError
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall

from txgrpc.stream import Chunk, Stream
from txgrpc.timers import stop_timer

if TYPE_CHECKING:
    from txgrpc.connection import Connection

_FLUSH_AT = 64 * 1024
# DATA frames sent before the reactor gets its turn: each may cost 100 microseconds, its method included.
_TURN = 64


class Sender:
    """Sends DATA as far as the peer's windows and the transport allow. The rest waits in its stream's outbox.

    Streams that wait take turns, a frame each. Nothing is sent while the transport has paused us (`paused`).
    However much a peer takes, one turn of the reactor sends only so many frames.
    """

    __slots__ = ("_blocked", "_connection", "_frames", "_h2", "_pumping", "_turn", "paused", "unflushed")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._h2 = connection.h2
        self._blocked: dict[int, Stream] = {}
        self._pumping = False
        self._frames = 0  # sent in this turn, or since the last `_next_turn`
        self._turn: IDelayedCall | None = None
        self.paused = False
        self.unflushed = 0  # bytes not handed to the transport yet; it may pause us when it gets them

    def send(self, stream: Stream, data: bytes, end: bool) -> Deferred[None] | None:
        """Send `data` now (None), or later: the Deferred fires when all of it is handed over."""
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
        if stream.outbox is None:
            stream.outbox = deque()
        stream.outbox.append(chunk)
        self._blocked[stream.id] = stream
        self.pump()
        return chunk.sent

    @property
    def waiting(self) -> int:
        """The streams whose data waits for the peer."""
        return len(self._blocked)

    def forget(self, stream: Stream) -> None:
        """Forget a stream that is over."""
        self._blocked.pop(stream.id, None)

    def clear(self) -> None:
        """Forget all streams."""
        self._blocked.clear()
        turn, self._turn = self._turn, None
        stop_timer(turn)

    def pump(self) -> None:
        """Send as much as possible now."""
        if self._pumping or self._turn is not None or not self._blocked:
            return  # if pumping, a caller up the stack sends the new data too
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
        """Send a frame of each stream. Returns whether any was sent."""
        sent = False
        for stream in list(self._blocked.values()):
            if self.paused or self._frames >= _TURN:
                return False
            if self._send_frame(stream):
                sent = True
                if self._blocked.pop(stream.id, None) is not None:
                    self._blocked[stream.id] = stream  # behind the streams whose turn is next
            if self.unflushed >= _FLUSH_AT:
                self._connection.flush_now()
        return sent

    def _send_frame(self, stream: Stream) -> bool:
        """Send the next frame of `stream`. Returns False if it has to wait or has none."""
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
            stream.outbox = None
            self.forget(stream)
        self._connection.sent(stream, end)
        chunk.sent.callback(None)
        return True

    def _send_data(self, stream: Stream, data: bytes, end: bool) -> bool:
        try:
            self._h2.send_data(stream.id, data, end_stream=end)
        except StreamClosedError:
            return False  # the peer has reset it; we get that event next
        self.unflushed += len(data)
        self._frames += 1
        return True

    def _window(self, stream: Stream) -> int:
        try:
            return int(self._h2.local_flow_control_window(stream.id))
        except StreamClosedError:
            return 0
