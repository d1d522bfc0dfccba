# SPDX-License-Identifier: Apache-2.0
"""Blocking calls that may hang forever, such as on a directory of a file server that is gone.

A hanging thread can't be ended, so other work must not depend on it. Each call here belongs to a lane, which
stands for the thing that may hang. The calls of a lane are made one after the other, so a lane occupies at
most one thread. If it does so for too long, that thread no longer counts as busy, and another is started.
Callers wait no longer than their deadline; once one has passed, further calls in that lane fail at once until
the thread is back.

The threads are daemon threads, so hanging ones don't keep the process from ending.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes_common.errors import DeadlineExceeded
from infranetes_common.reactors import IReactor

BUSY_SECONDS = 1.0  # after this time, a call counts as hanging
TICK_SECONDS = 0.25
IDLE_SECONDS = 10.0  # after this time, a thread without work ends
TURN = 50  # results delivered per reactor turn
MAX_THREADS = 1024  # including those that hang

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_log = Logger()


@attrs.define(eq=False)
class _Call:
    lane: str
    work: Callable[[], object]
    result: Deferred[Any]  # Any: results of every kind
    seconds: float
    until: float
    over: bool = False  # the result is no longer wanted, or was delivered


@attrs.define(eq=False)
class _Lane:
    waiting: deque[_Call] = attrs.field(factory=deque)
    running: _Call | None = None
    began: float = 0.0
    hanging: bool = False  # its thread hangs, and does not count as busy
    late: bool = False  # a call has missed its deadline


_this_thread = threading.local()


def still_alive() -> None:
    """Restart the deadline of the call that runs in this thread: for long work that makes progress.

    Does nothing outside of a lane.
    """
    call: _Call | None = getattr(_this_thread, "call", None)
    if call is not None:
        call.until = time.monotonic() + call.seconds


class Lanes:
    """A pool of threads that make the calls of any number of lanes.

    :param name: part of the threads' names.
    :param size: how many threads are busy at a time, not counting those that hang.
    """

    def __init__(self, reactor: IReactor, name: str, size: int) -> None:
        self._reactor = reactor
        self._name = name
        self._size = size
        self._changed = threading.Condition()
        self._lanes: dict[str, _Lane] = {}  # the lanes that have calls
        self._ready: deque[str] = deque()  # the lanes whose next call may begin
        self._threads = 0
        self._idle = 0
        self._hanging = 0
        self._done: list[tuple[_Call, object]] = []
        self._ticking: IDelayedCall | None = None
        self._closed = False

    def run(self, lane: str, seconds: float, work: Callable[[*Ts], T], *args: *Ts) -> Deferred[T]:
        """Call `work(*args)` in a thread; return its result or raise its error.

        If the result is cancelled or the deadline passes, a call that has begun is left to its thread, and
        one that has not begun is never made.

        :raise DeadlineExceeded: it has not ended after `seconds`, which `still_alive` restarts; or an earlier
            call of this lane still hangs.
        """
        result: Deferred[T] = Deferred(lambda _: self._give_up(call))
        call = _Call(lane, lambda: work(*args), result, seconds, time.monotonic() + seconds)
        with self._changed:
            known = self._lanes.get(lane)
            if self._closed or (known is not None and known.late):
                call.over = True
                result.errback(_too_late(lane))
                return result
            self._add(call)
        self._tick_later()
        return result

    def later(self, lane: str, work: Callable[[], None]) -> None:
        """Call `work` after all other calls in the lane, without a deadline. An error is logged."""
        call = _Call(lane, work, Deferred(), float("inf"), float("inf"))
        call.result.addErrback(lambda failure: _log.failure("work at {lane} failed", failure, lane=lane))
        with self._changed:
            if self._closed:
                return
            self._add(call)
        self._tick_later()

    def close(self) -> None:
        """Make no further calls, and fail the pending ones.

        Calls that have begun are left to their threads.
        """
        with self._changed:
            self._closed = True
            calls = [each for lane in self._lanes.values() for each in (lane.running, *lane.waiting) if each]
            self._ready.clear()
            self._changed.notify_all()
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None
        for call in calls:
            self._fail(call)

    # ---- the lock is held

    def _add(self, call: _Call) -> None:
        lane = self._lanes.get(call.lane)
        if lane is None:
            lane = self._lanes[call.lane] = _Lane()
            self._ready.append(call.lane)
        lane.waiting.append(call)
        self._serve()

    def _serve(self) -> None:
        """Wake or start a thread for the calls that are ready."""
        if self._idle:
            self._changed.notify(min(len(self._ready), self._idle))
        elif self._ready and self._threads - self._hanging < self._size and self._threads < MAX_THREADS:
            self._threads += 1
            threading.Thread(
                target=self._thd_work, name=f"PoolThread-infranetes-{self._name}", daemon=True
            ).start()

    # ---- in the reactor's thread

    def _tick_later(self) -> None:
        if self._ticking is None and not self._closed:
            self._ticking = self._reactor.callLater(TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        self._ticking = None
        now = time.monotonic()
        expired = []
        again = False
        with self._changed:
            for lane in self._lanes.values():
                if lane.running is not None and not lane.hanging and now - lane.began > BUSY_SECONDS:
                    lane.hanging = True
                    self._hanging += 1
                    self._serve()
                again = again or (lane.running is not None and not lane.hanging)
                for call in (lane.running, *lane.waiting):
                    if call is not None and not call.over:
                        again = True
                        if now > call.until:
                            lane.late = True
                            expired.append(call)
        for call in expired:
            self._fail(call)
        if again:
            self._tick_later()

    def _fail(self, call: _Call) -> None:
        if not call.over:
            call.over = True
            call.result.errback(_too_late(call.lane))

    def _give_up(self, call: _Call) -> None:
        call.over = True

    def _deliver(self) -> None:
        with self._changed:
            done, self._done = self._done[:TURN], self._done[TURN:]
            if self._done:
                self._reactor.callLater(0, self._deliver)
        for call, outcome in done:
            if not call.over:
                call.over = True
                call.result.callback(outcome)  # errback, if the outcome is a Failure

    # ---- in a thread

    def _thd_work(self) -> None:
        while (call := self._thd_next()) is not None:
            _this_thread.call = call
            try:
                outcome = None if call.over else call.work()
            except BaseException:
                outcome = Failure()
            _this_thread.call = None
            self._thd_end(call, outcome)

    def _thd_next(self) -> _Call | None:
        with self._changed:
            if self._threads - self._hanging > self._size:
                self._threads -= 1  # this thread was replaced while it hung
                return None
            while not self._ready:
                self._idle += 1
                woken = self._changed.wait(IDLE_SECONDS) if not self._closed else False
                self._idle -= 1
                if self._closed or not (woken or self._ready):
                    self._threads -= 1
                    return None
            lane = self._lanes[self._ready.popleft()]
            lane.running = lane.waiting.popleft()
            lane.began = time.monotonic()
            return lane.running

    def _thd_end(self, call: _Call, outcome: object) -> None:
        with self._changed:
            lane = self._lanes[call.lane]
            if lane.hanging:
                self._hanging -= 1
            lane.running, lane.hanging, lane.late = None, False, False
            if lane.waiting and not self._closed:
                self._ready.append(call.lane)
                self._serve()
            else:
                del self._lanes[call.lane]
            self._done.append((call, outcome))
            first = len(self._done) == 1
        if first and not self._closed:
            self._reactor.callFromThread(self._deliver)


def _too_late(lane: str) -> Failure:
    return Failure(DeadlineExceeded(f"{lane} does not answer: its file system hangs, or is far too slow"))
