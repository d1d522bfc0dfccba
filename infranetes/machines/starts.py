# SPDX-License-Identifier: Apache-2.0
"""The starts of pods that share the node's processors: as many at once as end soonest, the others in line.

Equal starts that share processors end together, all of them late. A few at a time, half of them have ended
at half of the time, and the last is no later.

    A start is   what is true                              goes to
    (unknown)    nothing is asked for                      WAITING, or UNDER WAY where there is a place
    WAITING      it stands in line                         UNDER WAY: a place is free and it is the first, or
                                                           it has been patient for long enough
                                                           (unknown): it is given up
    UNDER WAY    it has a place, for a limited time,       (unknown): it has ended, failed, or its time is
                 which each further step begins anew       over

Nothing of this is stored: the next daemon goes on with what was asked for first.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime

Tell = Callable[[int, int], None]
"""Called with how many starts are before this one in line, and how many are under way."""


@attrs.frozen(eq=False)
class _Waiting:
    urgent: bool
    id: str
    seconds: float
    tell: Tell
    turn: Deferred[None]


class Starts:
    """The starts under way, and the line.

    :param at_once: returns how many may be under way; 0: any number."""

    def __init__(self, clock: IReactorTime, at_once: Callable[[], int]) -> None:
        self._clock = clock
        self._at_once = at_once
        self._places: dict[str, IDelayedCall] = {}  # each with what ends its time
        self._line: list[_Waiting] = []
        self._when_idle: list[Callable[[], object]] = []
        self._stopped = False

    @property
    def under_way(self) -> int:
        """How many starts have a place."""
        return len(self._places)

    @property
    def waiting(self) -> int:
        """How many stand in line."""
        return len(self._line)

    def must_wait(self, id: str) -> bool:
        """Return whether `turn` would wait."""
        return id not in self._places and bool(self._line or not self._has_room())

    async def turn(
        self, id: str, seconds: float, patience: float, tell: Tell, *, urgent: bool = False
    ) -> None:
        """Wait for a place, unless this start has one. Cancelling leaves the line.

        :param urgent: whether it goes before all that are not.
        :param seconds: how long it may have the place. :param patience: how long it waits at most."""
        if not self.must_wait(id):
            self.take(id, seconds)
            return
        turn: Deferred[None] = Deferred(lambda _: self._leave(waiting))
        waiting = _Waiting(urgent, id, seconds, tell, turn)
        place = sum(start.urgent for start in self._line) if urgent else len(self._line)
        self._line.insert(place, waiting)
        self._tell(place)
        impatient = self._clock.callLater(patience, self._run_out, waiting)
        try:
            await turn
        finally:
            if impatient.active():
                impatient.cancel()

    def take(self, id: str, seconds: float) -> None:
        """Give the start a place for this time, even if there is none left, in place of what it had."""
        if self._at_once() and not self._stopped:
            self._forget(id)
            self._places[id] = self._clock.callLater(seconds, self.end, id)

    def end(self, id: str) -> None:
        """Give the start's place to the first in line. Does nothing if it has none."""
        if id in self._places:
            self._forget(id)
            self._go_on()

    def when_idle(self, call: Callable[[], object]) -> bool:
        """Return whether no start is under way or waits. Otherwise call `call` once that is so."""
        idle = not self._places and not self._line
        if not idle and call not in self._when_idle:
            self._when_idle.append(call)
        return idle

    def stop(self) -> None:
        """Give nobody a place any more."""
        self._stopped = True
        for id in list(self._places):
            self._forget(id)

    def _has_room(self) -> bool:
        most = self._at_once()
        return not most or len(self._places) < most

    def _forget(self, id: str) -> None:
        ending = self._places.pop(id, None)
        if ending is not None and ending.active():
            ending.cancel()

    def _leave(self, waiting: _Waiting) -> None:
        if waiting in self._line:
            self._line.remove(waiting)
            self._go_on()

    def _run_out(self, waiting: _Waiting) -> None:
        if not self._stopped:
            self._give(waiting)
            self._tell()

    def _give(self, waiting: _Waiting) -> None:
        self._line.remove(waiting)
        self.take(waiting.id, waiting.seconds)
        waiting.turn.callback(None)

    def _go_on(self) -> None:
        """Give away the places that are free, and tell those in line how many are before them."""
        while self._line and self._has_room() and not self._stopped:
            self._give(self._line[0])
        self._tell()
        if not self._places and not self._line:
            calls, self._when_idle = self._when_idle, []
            for call in calls:
                call()

    def _tell(self, first: int = 0) -> None:
        for before, waiting in enumerate(self._line[first:], first):
            waiting.tell(before, self.under_way)
