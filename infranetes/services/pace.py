# SPDX-License-Identifier: Apache-2.0
"""How fast VMs are told what changes: many of them wait for each other, and all for everybody else."""

from __future__ import annotations

from collections import deque

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime

TURN_SECONDS = 0.01  # that the reactor is kept busy at a time
SHORT_SECONDS = 0.05  # of work, after which there is no rest
REST = 2.0  # times as long as there was work, nothing is done; what changes meanwhile is told at once
MAX_REST_SECONDS = 1.0


class Pace:
    """Tells who has something to do when to do it.

    A few have their turn at once. Where there are so many that they fill several turns of the reactor, what
    they lead to, such as answers, would fill others: so it is rested afterwards.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._waiting: deque[Deferred[None]] = deque()
        self._next: IDelayedCall | None = None
        self._over = 0.0  # when this turn of the reactor has been long enough
        self._worked = 0.0  # seconds, since there was nobody to wait

    def turn(self) -> Deferred[None] | None:
        """Call this before each piece of work: the Deferred fires when it may begin; None: at once."""
        if self._next is None:
            self._begin()
        if not self._waiting and self._clock.seconds() < self._over:
            return None
        waiting: Deferred[None] = Deferred(self._waiting.remove)
        self._waiting.append(waiting)
        return waiting

    def _begin(self) -> None:
        """Have a turn of the reactor, and then another one if somebody waits."""
        self._over = self._clock.seconds() + TURN_SECONDS
        self._next = self._clock.callLater(0, self._go_on)

    def _go_on(self) -> None:
        self._next = None
        if not self._waiting:
            self._rest()
            return
        self._begin()
        began = self._clock.seconds()
        while self._waiting and self._clock.seconds() < self._over:
            self._waiting.popleft().callback(None)
        self._worked += self._clock.seconds() - began

    def _rest(self) -> None:
        """Have those that come now wait, if there was much to do."""
        worked, self._worked = self._worked, 0.0
        if worked > SHORT_SECONDS:
            self._over = 0.0
            self._next = self._clock.callLater(min(REST * worked, MAX_REST_SECONDS), self._go_on)
