# SPDX-License-Identifier: Apache-2.0
"""The pace at which changes are sent to VMs: many senders take turns, and leave time for other work."""

from __future__ import annotations

from collections import deque

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime

TURN_SECONDS = 0.01  # how long senders may keep the reactor busy at a time
SHORT_SECONDS = 0.05  # work of this length or less needs no rest
REST = 2.0  # a rest takes this many times as long as the work; changes during it are sent together
MAX_REST_SECONDS = 1.0


class Pace:
    """Schedules the turns of senders.

    A few senders have their turn at once. If they are so many that they fill several turns of the reactor,
    the work that follows, such as handling answers, would fill more: so a rest comes afterwards.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._waiting: deque[Deferred[None]] = deque()
        self._next: IDelayedCall | None = None
        self._over = 0.0  # the time at which this turn of the reactor has to end
        self._worked = 0.0  # seconds of work since no sender was waiting

    def turn(self) -> Deferred[None] | None:
        """Ask for a turn before each piece of work.

        The Deferred fires when the work may begin; None: at once."""
        if self._next is None:
            self._begin()
        if not self._waiting and self._clock.seconds() < self._over:
            return None
        waiting: Deferred[None] = Deferred(self._waiting.remove)
        self._waiting.append(waiting)
        return waiting

    def _begin(self) -> None:
        """Begin a turn of the reactor, and schedule another one for senders that wait by then."""
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
        """Make senders wait for a while, if there was much work."""
        worked, self._worked = self._worked, 0.0
        if worked > SHORT_SECONDS:
            self._over = 0.0
            self._next = self._clock.callLater(min(REST * worked, MAX_REST_SECONDS), self._go_on)
