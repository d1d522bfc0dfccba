"""Waiting: with a deadline, for work that others wait for too, and for work that must not be cut short."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from infranetes_common.errors import DeadlineExceeded

T = TypeVar("T")


def go(work: Coroutine[Any, Any, T]) -> Deferred[T]:
    """Start a coroutine."""
    return Deferred.fromCoroutine(work)


def sleep(clock: Any, seconds: float) -> Deferred[None]:
    """Fires after `seconds`."""
    return deferLater(clock, seconds, lambda: None)


async def within(clock: Any, seconds: float, work: Deferred[T], what: str) -> T:
    """The result of `work`, which is cancelled when it takes longer.

    :raise DeadlineExceeded: `what` (words for people) took longer than `seconds`.
    """
    try:
        return await work.addTimeout(max(seconds, 0.001), clock)
    except DeferredTimeout:
        raise DeadlineExceeded(f"{what} took longer than {seconds:.0f} s") from None


class Flight(Generic[T]):
    """Work under way that any number of callers wait for. A caller that goes away does not end it.

    :ivar waiters: how many wait now. :ivar done: whether the work has ended.
    :param deserted: called each time when the last one has gone away while the work goes on.
    """

    def __init__(self, work: Deferred[T], deserted: Callable[[], None] = lambda: None) -> None:
        self.waiters = 0
        self.done = False
        self._work = work
        self._deserted = deserted
        self._joined: list[Deferred[T]] = []
        self._result: Any = None
        work.addBoth(self._finish)

    def join(self) -> Deferred[T]:
        """The work's result. Cancelling this only stops waiting."""
        joined: Deferred[T] = Deferred(self._leave)
        if self.done:
            joined.callback(self._result)
        else:
            self._joined.append(joined)
            self.waiters += 1
        return joined

    def cancel(self) -> None:
        """End the work itself."""
        self._work.cancel()

    def _leave(self, joined: Deferred[T]) -> None:
        self._joined.remove(joined)
        self.waiters -= 1
        if not self.waiters and not self.done:
            self._deserted()

    def _finish(self, result: Any) -> None:
        self.done = True
        self._result = result
        joined, self._joined, self.waiters = self._joined, [], 0
        for one in joined:
            one.callback(result)


async def uncut(work: Deferred[T]) -> T:
    """The result of `work`, which goes on to its end even when the caller is cancelled meanwhile."""
    return await Flight(work).join()


async def settle(works: list[Deferred[Any]]) -> list[Any]:
    """Every one's result, or its Failure; fires when all have ended. Cancelled: all of them are."""
    results: list[Any] = []
    flights = [Flight(work) for work in works]
    try:
        for flight in flights:
            try:
                results.append(await flight.join())
            except CancelledError:
                if not flight.done:
                    raise
                results.append(Failure())
            except Exception:
                results.append(Failure())
    except CancelledError:
        for flight in flights:
            if not flight.done:
                flight.cancel()
        raise
    return results


class Signal:
    """Something that becomes true once; any number wait for it."""

    def __init__(self) -> None:
        self.fired = False
        self._waiting: list[Deferred[None]] = []

    def fire(self) -> None:
        """It is true. Twice is once."""
        self.fired = True
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.callback(None)

    def wait(self) -> Deferred[None]:
        """Fires once it is true."""
        waiting: Deferred[None] = Deferred(self._waiting.remove)
        if self.fired:
            waiting.callback(None)
        else:
            self._waiting.append(waiting)
        return waiting
