# SPDX-License-Identifier: Apache-2.0
"""Blocking work that ends by itself, in threads. Work that may hang forever belongs in `lanes`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple, cast
from weakref import WeakKeyDictionary

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorCore, IReactorThreads
from twisted.internet.threads import deferToThreadPool
from twisted.python.failure import Failure
from twisted.python.threadpool import ThreadPool

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LOGS = "logs"
IMAGES = "images"
KEEPING = "keeping"
_SIZES = {LOGS: 2, IMAGES: 6, KEEPING: 2}  # threads per purpose, so that a busy purpose delays no other

_pools: WeakKeyDictionary[IReactorThreads, dict[str, ThreadPool]] = WeakKeyDictionary()


def threads_for(reactor: IReactorThreads, purpose: str) -> ThreadPool:
    """Return the thread pool of a purpose, which ends with the reactor.

    :param purpose: `LOGS`, `IMAGES`, `KEEPING`, or "" for the reactor's own pool, which is for short work.
    """
    if not purpose:
        return reactor.getThreadPool()
    pools = _pools.setdefault(reactor, {})
    if purpose not in pools:
        pool = pools[purpose] = ThreadPool(0, _SIZES[purpose], f"infranetes-{purpose}")
        pool.start()
        cast(IReactorCore, reactor).addSystemEventTrigger("during", "shutdown", pool.stop)
    return pools[purpose]


async def run_in_thread(
    reactor: IReactorThreads,
    work: Callable[[*Ts], T],
    *args: *Ts,
    on_cancel: Callable[[], None] | None = None,
    purpose: str = "",
) -> T:
    """Call `work(*args)` in a thread; return its result or raise its error.

    A thread can't be cancelled. If the caller is, `on_cancel` is called, so that the work may end sooner, and
    `CancelledError` is raised only after the thread has ended, so that files it uses may be closed.

    :param purpose: selects the pool of threads, see `threads_for`.
    """
    outcome: list[T | Failure] = []
    waiting: Deferred[None] = Deferred()

    def done(result: T | Failure) -> None:
        outcome.append(result)
        if not waiting.called:
            waiting.callback(None)

    deferToThreadPool(reactor, threads_for(reactor, purpose), work, *args).addBoth(done)
    cancelled: CancelledError | None = None
    while not outcome:
        try:
            await waiting
        except CancelledError as error:
            cancelled = error
            waiting = Deferred()
            if on_cancel is not None:
                on_cancel()
    if cancelled is not None:
        raise cancelled
    result = outcome[0]
    if isinstance(result, Failure):
        result.raiseException()
    return result
