"""Waiting for work to the end: in the reactor's threads, and of coroutines that are cancelled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.threads import deferToThreadPool
from twisted.python.failure import Failure

T = TypeVar("T")


async def in_thread(
    reactor: Any, work: Callable[..., T], *args: Any, on_cancel: Callable[[], None] | None = None
) -> T:
    """What `work(*args)` returns or raises. Cancelled meanwhile, it calls `on_cancel`, waits for the
    thread all the same (so that the files it uses may be closed) and is cancelled then."""
    running: Deferred[T] = deferToThreadPool(reactor, reactor.getThreadPool(), work, *args)
    outcome: list[Any] = []
    waiting: Deferred[None] = Deferred()

    def done(result: Any) -> None:
        outcome.append(result)
        if not waiting.called:
            waiting.callback(None)

    running.addBoth(done)
    cancelled: CancelledError | None = None
    while not outcome:
        try:
            await waiting
        except CancelledError as e:
            cancelled = e
            waiting = Deferred()
            if on_cancel is not None:
                on_cancel()
    if cancelled is not None:
        raise cancelled
    result = outcome[0]
    if isinstance(result, Failure):
        result.raiseException()
    return cast(T, result)


async def settled(task: Deferred[Any]) -> None:
    """Once `task` has ended, however; cancelling this wait does not end it."""
    ended = False
    waiting: Deferred[None] = Deferred()

    def tell(result: Any) -> Any:
        nonlocal ended
        ended = True
        if not waiting.called:
            waiting.callback(None)
        return result

    task.addBoth(tell)
    while not ended:  # `called` would be no sign: a cancelled coroutine's Deferred is, and goes on
        try:
            await waiting
        except CancelledError:
            waiting = Deferred()
