# SPDX-License-Identifier: Apache-2.0
"""The bounds on the resources that one peer may use, and the meters that enforce them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import attrs

KIB = 1024
MIB = 1024 * KIB


@attrs.frozen
class Limits:
    """Bounds of a server's or a channel's connections. Sizes are bytes, times are seconds.

    One connection holds at most ``max_concurrent_streams * stream_window + max_assembling`` bytes of
    received data that the application has not taken yet, and what calls asked for (`Call.receive_ahead`).
    """

    #: The largest message taken from the other side; a larger one ends its call with RESOURCE_EXHAUSTED.
    max_receive_message: int = attrs.field(default=16 * MIB, validator=attrs.validators.ge(0))
    #: The most bytes that all incomplete messages larger than a window may hold on one connection.
    max_assembling: int = attrs.field(default=64 * MIB, validator=attrs.validators.ge(0))
    #: The most bytes that the peer may send ahead of the application on one call. HTTP/2's initial window is
    #: the minimum.
    stream_window: int = attrs.field(default=128 * KIB, validator=attrs.validators.ge(65535))
    #: The most bytes that the peer may have in flight on one connection.
    connection_window: int = attrs.field(default=1 * MIB, validator=attrs.validators.ge(65535))
    #: The largest frame taken from the other side. It is handled at once, and buffered until it is complete.
    #: HTTP/2's default is the minimum.
    max_frame: int = attrs.field(
        default=16 * KIB, validator=[attrs.validators.ge(16 * KIB), attrs.validators.lt(16 * MIB)]
    )
    #: The calls that one peer may have open at once.
    max_concurrent_streams: int = attrs.field(default=512, validator=attrs.validators.ge(1))
    #: The largest header list of one call: names, values and 32 bytes for each field. A call over it is
    #: refused; over four times the limit, the connection is closed.
    max_header_list: int = attrs.field(default=16 * KIB, validator=attrs.validators.ge(1024))
    #: The most bytes of output that may queue up for a peer that sends requests without reading the answers.
    max_unread_output: int = attrs.field(default=1 * MIB, validator=attrs.validators.ge(KIB))
    #: The connections that a server has at once. To one more, the oldest gives way of those that have sent no
    #: SETTINGS, else of those that have begun no call, else that wait for no method, else that don't read.
    max_connections: int = attrs.field(default=1024, validator=attrs.validators.ge(1))
    #: Seconds from the making of the connection until the peer's SETTINGS arrive.
    handshake_timeout: float = attrs.field(default=20.0, validator=attrs.validators.gt(0))
    #: Seconds from a keepalive PING until anything arrives from the peer.
    keepalive_timeout: float = attrs.field(default=20.0, validator=attrs.validators.gt(0))
    #: Seconds from GOAWAY for misbehaviour until the connection is cut, whether or not the peer has read it.
    close_timeout: float = attrs.field(default=5.0, validator=attrs.validators.gt(0))


class Allowance:
    """A token bucket for events that cost the peer less than they cost us."""

    __slots__ = ("_at", "_burst", "_per_second", "_tokens")

    def __init__(self, burst: float, per_second: float, now: float) -> None:
        self._burst = self._tokens = burst
        self._per_second = per_second
        self._at = now

    def earn(self, tokens: float) -> None:
        """Allow `tokens` more, for honest work that was done."""
        self._tokens = min(self._burst, self._tokens + tokens)

    def spend(self, now: float) -> bool:
        """Return whether it may be done once more at `now` (seconds)."""
        self.earn((now - self._at) * self._per_second)
        self._at = now
        self._tokens -= 1
        return self._tokens >= 0


class Budget:
    """Bytes shared by a connection's large messages. When it is spent, further messages wait in a queue.

    A reservation larger than the whole budget is granted when nothing else is reserved, so that every message
    within the size limit arrives in the end.
    """

    __slots__ = ("_queue", "_reserved", "_total")

    def __init__(self, total: int) -> None:
        self._total = total
        self._reserved = 0
        self._queue: deque[tuple[int, Callable[[], None]]] | None = None

    def reserve(self, size: int, granted: Callable[[], None]) -> bool:
        """Call `granted` once `size` bytes are reserved: now (True), or after others were released."""
        if not self._queue and self._fits(size):
            self._reserved += size
            granted()
            return True
        if self._queue is None:
            self._queue = deque()
        self._queue.append((size, granted))
        return False

    def release(self, size: int) -> None:
        """Return a granted reservation of `size` bytes."""
        self._reserved -= size
        self._serve()

    def withdraw(self, granted: Callable[[], None]) -> None:
        """Leave the queue without a grant."""
        if self._queue:
            self._queue = deque(entry for entry in self._queue if entry[1] is not granted)
            self._serve()

    def _serve(self) -> None:
        while self._queue and self._fits(self._queue[0][0]):
            size, granted = self._queue.popleft()
            self._reserved += size
            granted()

    def _fits(self, size: int) -> bool:
        return self._reserved == 0 or self._reserved + size <= self._total
