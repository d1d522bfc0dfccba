# SPDX-License-Identifier: Apache-2.0
"""Hours that pass in seconds, for code that also calls servers and runs threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock, deferLater
from twisted.python.threadpool import ThreadPool
from zope.interface import directlyProvides, providedBy

from infranetes_common.reactors import IReactor

_TURNS = 3  # idle turns in a row after which all is quiet
_TURN_SECONDS = 0.002
# The reactor's iterations in a turn, at the least. To write, to read, to write the answer and to read it
# takes one each, and on a busy machine no more than one fits in a turn's time.
_ITERATIONS = 3


class VirtualTime(Clock):  # type: ignore[misc]
    """A reactor whose timed calls run in virtual time; everything else is another reactor's.

    :param real: the other reactor."""

    def __init__(self, real: IReactor) -> None:
        super().__init__()
        self.rightNow = real.seconds()
        self._real = real
        directlyProvides(self, providedBy(real))

    def __getattr__(self, name: str) -> Any:  # Any: whatever a reactor has
        return getattr(self._real, name)

    @property
    def reactor(self) -> IReactor:
        """This object, typed as a whole reactor."""
        return cast(IReactor, self)

    async def until(self, done: Callable[[], object], pools: Sequence[ThreadPool] = ()) -> None:
        """Let time jump from one timed call to the next until `done` returns true. It stands still while
        threads work.

        :param pools: thread pools besides the reactor's."""
        every = [*pools, self._real.getThreadPool()]
        while True:
            await self._quiet(every)
            if done():
                return
            following = min((call.getTime() for call in self.getDelayedCalls()), default=None)
            assert following is not None, "nothing will ever happen any more"
            self.advance(max(0.0, following - self.seconds()))

    async def after(self, seconds: float, pools: Sequence[ThreadPool] = ()) -> None:
        """Let `seconds` of virtual time pass. :param pools: as for `until`."""
        over: list[None] = []
        self.callLater(seconds, over.append, None)
        await self.until(lambda: over, pools)

    async def _quiet(self, pools: Sequence[ThreadPool]) -> None:
        quiet = 0
        while quiet < _TURNS:
            for seconds in (_TURN_SECONDS, *(0.0 for _ in range(_ITERATIONS - 1))):
                turn: Deferred[None] = deferLater(self._real, seconds, lambda: None)
                await turn
            quiet = 0 if any(pool.working or pool.q.qsize() for pool in pools) else quiet + 1
