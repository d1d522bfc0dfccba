"""Blocking work in the reactor's thread pool, never abandoned half done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.threads import deferToThreadPool

T = TypeVar("T")


async def in_thread(
    reactor: Any, work: Callable[..., T], *args: Any, on_cancel: Callable[[], None] | None = None
) -> T:
    """What `work(*args)` returns or raises. Cancelled meanwhile, it calls `on_cancel`, waits for the
    thread all the same (so that the files it uses may be closed) and is cancelled then."""
    running: Deferred[T] = deferToThreadPool(reactor, reactor.getThreadPool(), work, *args)
    cancelled: CancelledError | None = None
    while not running.called:
        waiting: Deferred[None] = Deferred()

        def tell(result: Any, waiting: Deferred[None] = waiting) -> Any:
            if not waiting.called:
                waiting.callback(None)
            return result

        running.addBoth(tell)
        try:
            await waiting
        except CancelledError as e:
            cancelled = e
            if on_cancel is not None:
                on_cancel()
    if cancelled is not None:
        running.addErrback(lambda _: None)
        raise cancelled
    return await running
