# SPDX-License-Identifier: Apache-2.0
"""Coroutines and Deferreds: started, waited for with a deadline, shared, shielded from cancellation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.error import ConnectingCancelledError
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from infranetes_common.errors import DeadlineExceeded

T = TypeVar("T")
P = ParamSpec("P")

Coro: TypeAlias = Coroutine[Any, Any, T]  # Any: whatever it awaits
"""A coroutine that a Deferred can be made of, as `async def` gives them."""

Work: TypeAlias = Deferred[T] | Coro[T]
"""The argument of the functions below: a Deferred, or a coroutine, which they start."""


def start(work: Coro[T]) -> Deferred[T]:
    """Start a coroutine: `Deferred.fromCoroutine`, with its type kept.

    Cancelling the Deferred raises `CancelledError` in the coroutine, at its present `await`.
    """
    return Deferred.fromCoroutine(work)


def deferred(method: Callable[P, Coro[T]]) -> Callable[P, Deferred[T]]:
    """Make an `async def` function return a Deferred, for interfaces and callers that expect one.

    The body starts when the function is called, not when its result is awaited.
    """

    @functools.wraps(method)
    def started(*args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        return Deferred.fromCoroutine(method(*args, **kwargs))

    return started


def _started(work: Work[T]) -> Deferred[T]:
    return work if isinstance(work, Deferred) else start(work)


def sleep(clock: IReactorTime, seconds: float) -> Deferred[None]:
    """Fire after `seconds`. Cancelling it also cancels the timer."""
    return deferLater(clock, seconds, lambda: None)


async def within(clock: IReactorTime, seconds: float, work: Work[T], what: str) -> T:
    """Return the result of `work`; cancel it if it takes longer than `seconds`.

    :param what: names the work in the error's message, as in "destroying the VM of sandbox 1f2e".
    :raise DeadlineExceeded: `what` took longer than `seconds`.
    """
    try:
        return await _started(work).addTimeout(max(seconds, 0.001), clock)
    except DeferredTimeout:
        raise DeadlineExceeded(f"{what} took longer than {seconds:g} s") from None


class Flight(Generic[T]):
    """Work that any number of callers wait for and that outlives them.

    Every `join` gets the result, even after the end. An error that nobody has joined is not reported as
    unhandled.

    :ivar waiters: the number of callers waiting now.
    :ivar done: True once the work has ended.
    :param deserted: called whenever the last waiting caller cancels while the work goes on.
    """

    def __init__(self, work: Work[T], deserted: Callable[[], None] = lambda: None) -> None:
        self.waiters = 0
        self.done = False
        self._cancelled = False
        self._work = _started(work)
        self._deserted = deserted
        self._joined: dict[Deferred[T], None] = {}
        self._result: T | Failure
        self._work.addBoth(self._finish)

    def join(self) -> Deferred[T]:
        """Wait for the work's result. Cancelling this Deferred ends the wait, not the work."""
        joined: Deferred[T] = Deferred(self._leave)
        if self.done:
            joined.callback(self._result)  # errback, if the result is a Failure
        else:
            self._joined[joined] = None
            self.waiters += 1
        return joined

    def cancel(self) -> None:
        """Cancel the work itself, once: what it does to clean up is not cut short by a second call.

        Waiting callers get the result that it then ends with."""
        if not self._cancelled:
            self._cancelled = True
            self._work.cancel()

    def _leave(self, joined: Deferred[T]) -> None:
        if joined in self._joined:
            del self._joined[joined]
            self.waiters -= 1
            if not self.waiters:
                self._deserted()

    def _finish(self, result: T | Failure) -> None:
        self.done = True
        self._result = result
        joined, self._joined, self.waiters = self._joined, {}, 0
        for each in joined:
            if not each.called:
                each.callback(result)


async def shielded(work: Work[T]) -> T:
    """Return the result of `work`, which goes on to its end when the caller is cancelled meanwhile.

    The cancelled caller gets its `CancelledError` at once, and an error of the work is then dropped.
    """
    return await Flight(work).join()


async def settled(works: Iterable[Work[T]]) -> list[T | Failure]:
    """Wait until every one of `works` has ended; return each one's result, or its Failure, in order.

    Cancelling this cancels the works that have not ended, and does not wait for their end.
    """
    results: list[T | Failure] = []
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


async def cancellable(work: Work[T]) -> T:
    """Return the result of `work`, and raise `CancelledError` where a client of Twisted's was cancelled.

    Those of HTTP wrap it in errors of their own, and endpoints have another for it while they connect. So
    neither a deadline (`within`) nor a caller that is cancelled would know its own end.
    """
    try:
        return await work
    except CancelledError:
        raise
    except Exception as error:
        if _was_cancelled(error):
            raise CancelledError from error
        raise


def _was_cancelled(error: BaseException) -> bool:
    return isinstance(error, CancelledError | ConnectingCancelledError) or any(
        _was_cancelled(reason.value) for reason in getattr(error, "reasons", ())
    )


async def until_ended(work: Deferred[T]) -> None:
    """Wait until `work` has ended, and leave its result, or failure, to its other users.

    Cancelling the wait does nothing: use it where the work must keep its files or processes to its end.
    What follows goes on within the callbacks of `work`, which can't be awaited there: see `to_its_end`.
    """
    ended = False
    waiting: Deferred[None] = Deferred()

    def tell(result: T) -> T:
        nonlocal ended
        ended = True
        if not waiting.called:
            waiting.callback(None)
        return result

    work.addBoth(tell)
    while not ended:  # `work.called` is true also of a cancelled coroutine that still runs
        try:
            await waiting
        except CancelledError:
            waiting = Deferred()


async def to_its_end(work: Deferred[T]) -> T:
    """Return the result of `work`, or raise its error, once it has ended. Nobody else has it then.

    Cancelling this does nothing, as with `until_ended`.
    """
    outcomes: list[T | Failure] = []
    work.addBoth(outcomes.append)
    await until_ended(work)
    outcome = outcomes[0]
    if isinstance(outcome, Failure):
        outcome.raiseException()
    return outcome
