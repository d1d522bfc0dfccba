# SPDX-License-Identifier: Apache-2.0
"""Turns of the reactor: messages are handled for a moment, then everything else has its turn."""

from __future__ import annotations

from collections import deque

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime

TURN_SECONDS = 0.002


class Turns:
    """Shares the reactor between the streams of one channel, and between the channel and all other work.

    A server that sends faster than its messages are handled would otherwise hold the reactor for as long as
    it continues. All streams of a channel share a turn, however often the transport delivers data in it.
    Streams that get nothing of a turn wait in a queue, and one of them continues in each following turn.
    """

    __slots__ = ("_next_turn", "_over", "_queue", "_reactor", "_seconds")

    def __init__(self, reactor: IReactorTime, seconds: float = TURN_SECONDS) -> None:
        self._reactor = reactor
        self._seconds = seconds
        self._next_turn: IDelayedCall | None = None  # begins the next turn; None: this one had no work
        self._over = 0.0  # the time when this turn ends
        self._queue: deque[Deferred[None]] | None = None  # once something waits

    def rest(self) -> Deferred[None] | None:
        """Call this before each piece of work: the Deferred fires when it may begin; None: at once."""
        now = self._reactor.seconds()
        if self._next_turn is None:
            self._begin(now)
        if now <= self._over:
            return None
        resting: Deferred[None] = Deferred(self._withdraw)
        if self._queue is None:
            self._queue = deque()
        self._queue.append(resting)
        return resting

    def _withdraw(self, resting: Deferred[None]) -> None:
        assert self._queue is not None
        self._queue.remove(resting)

    def _begin(self, now: float) -> None:
        self._over = now + self._seconds
        self._next_turn = self._reactor.callLater(0, self._next)

    def _next(self) -> None:
        """Begin a turn with the first in the queue."""
        self._next_turn = None
        if self._queue:
            self._begin(self._reactor.seconds())
            self._queue.popleft().callback(None)
