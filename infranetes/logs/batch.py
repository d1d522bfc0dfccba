# SPDX-License-Identifier: Apache-2.0
"""Small blocking calls of very many callers, made in few trips to a thread.

A trip costs twenty times what appending a line to a file does (measured: 600 against 25 microseconds on a
busy machine with two cores), so the calls that come during one trip share the next. A thread is
needed, because any write waits while a disk is behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

import attrs
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from infranetes_common.concurrency import LOGS, run_in_thread, sleep, start
from infranetes_common.reactors import IReactor

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CALLS = 100  # in one trip to the thread: all of their callbacks run in one turn of the reactor


@attrs.frozen(eq=False)
class _Call:
    work: Callable[[], object]
    result: Deferred[Any]  # Any: calls have results of every kind


_batchers: WeakKeyDictionary[IReactor, _Batcher] = WeakKeyDictionary()


def batched(reactor: IReactor, work: Callable[[*Ts], T], *args: *Ts) -> Deferred[T]:
    """Return or raise what `work(*args)` does in one of the logs' threads.

    Calls are made in the order in which they come. Cancelling the result does not end the call.
    """
    batcher = _batchers.get(reactor)
    if batcher is None:
        batcher = _batchers[reactor] = _Batcher()
    return batcher.add(reactor, lambda: work(*args))


class _Batcher:
    """The calls of one reactor."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._running = False

    def add(self, reactor: IReactor, work: Callable[[], T]) -> Deferred[T]:
        result: Deferred[T] = Deferred()
        self._calls.append(_Call(work, result))
        if not self._running:
            self._running = True
            start(self._run(reactor))
        return result

    async def _run(self, reactor: IReactor) -> None:
        while self._calls:
            calls, self._calls = self._calls[:CALLS], self._calls[CALLS:]
            outcomes = await run_in_thread(reactor, _make, calls, purpose=LOGS)
            for call, outcome in zip(calls, outcomes, strict=True):
                call.result.callback(outcome)  # a Failure becomes an errback
            await sleep(reactor, 0)
        self._running = False


def _make(calls: list[_Call]) -> list[object]:
    outcomes: list[object] = []
    for call in calls:
        try:
            outcomes.append(call.work())
        except Exception:
            outcomes.append(Failure())
    return outcomes
