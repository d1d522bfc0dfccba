# SPDX-License-Identifier: Apache-2.0
"""The queue in which calls to a cloud wait until the rate limit lets them through."""

from __future__ import annotations

from collections import deque

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from infranetes.providers.cloud.calls.throttle import RateLimit


class CallQueue:
    """The queue of calls that one limit counts."""

    def __init__(self, clock: IReactorTime, limit: RateLimit) -> None:
        self._clock = clock
        self.limit = limit
        self._waiting: deque[Deferred[None]] = deque()
        self._timer: IDelayedCall | None = None

    def expected(self, *, again: bool = False) -> float:
        """Seconds until a turn that is asked for now."""
        return self.limit.wait(0 if again else len(self._waiting))

    def take(self, *, again: bool = False) -> Deferred[None]:
        """Fire when it is the caller's turn; a cancelled caller leaves the queue.

        :param again: a call that was refused, which goes before all that were not made yet."""
        turn: Deferred[None] = Deferred(self._leave)
        if again:
            self._waiting.appendleft(turn)
        else:
            self._waiting.append(turn)
        self._give()
        return turn

    def _leave(self, turn: Deferred[None]) -> None:
        if turn in self._waiting:
            self._waiting.remove(turn)
        self._give()

    def _give(self) -> None:
        """Give all turns that are due, and wait for the next one."""
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None
        due = []
        while self._waiting and not self.limit.wait():
            self.limit.take()
            due.append(self._waiting.popleft())
        if self._waiting:
            self._timer = self._clock.callLater(self.limit.wait(), self._give)
        for turn in due:
            turn.callback(None)
