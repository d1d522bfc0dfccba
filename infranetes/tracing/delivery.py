# SPDX-License-Identifier: Apache-2.0
"""The queue of spans for the collector: it is bounded, and emptied in a thread.

It replaces OpenTelemetry's BatchSpanProcessor, which says that it drops spans but not how many, and starts a
thread in each forked child before that executes its program.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes_common.concurrency import Flight, Lanes, within
from infranetes_common.errors import DeadlineExceeded
from infranetes_common.reactors import IReactor

MAX_WAITING = 4096  # spans
BATCH = 512
PAUSE_SECONDS = 2.0  # from a span's end until it is sent, together with all spans that end meanwhile
REQUEST_SECONDS = 30.0  # longer than the exporter's own deadline, which normally ends a request first
STOP_SECONDS = 2.0

S = TypeVar("S")
_log = Logger()


class Delivery(Generic[S]):
    """Sends spans in batches, a moment after they were put in, and drops those that can't be sent.

    :param send: sends a batch, in a thread; returns False if it was refused.
    :param where: the collector, for the log.
    :ivar lost: how many spans were dropped.
    """

    def __init__(self, reactor: IReactor, send: Callable[[Sequence[S]], bool], where: str) -> None:
        self.lost = 0
        self._reactor = reactor
        self._thd_send = send
        self._where = where
        self._lanes = Lanes(reactor, "traces", 1)
        self._waiting: deque[S] = deque()
        self._later: IDelayedCall | None = None
        self._sending: Flight[None] | None = None
        self._stopped = False
        self._failing = False

    def put(self, span: S) -> None:
        """Queue a span. It is dropped if the queue is full."""
        if self._stopped or len(self._waiting) >= MAX_WAITING:
            self._lose(1)
            return
        self._waiting.append(span)
        self._send_later()

    async def stop(self) -> None:
        """Send what waits, for no longer than `STOP_SECONDS`. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        if self._later is not None:
            self._later.cancel()
            self._later = None
        try:
            await within(self._reactor, STOP_SECONDS, self._send_rest(), "sending the last spans")
        except DeadlineExceeded:
            if self._sending is not None:
                self._sending.cancel()
            self._lose(len(self._waiting))
            self._waiting.clear()
        self._lanes.close()
        if self.lost:
            _log.info("{lost} spans were lost", lost=self.lost)

    def _send_later(self) -> None:
        if self._later is None and self._sending is None and not self._stopped:
            self._later = self._reactor.callLater(PAUSE_SECONDS, self._send_now)

    def _send_now(self) -> None:
        self._later = None
        self._sending = Flight(self._send_waiting())
        self._sending.join().addBoth(self._sent)

    def _sent(self, outcome: object) -> None:
        self._sending = None
        if isinstance(outcome, Failure) and not self._stopped:
            _log.failure("spans were not sent", failure=outcome)
        if self._waiting:
            self._send_later()

    async def _send_rest(self) -> None:
        if self._sending is not None:
            await self._sending.join()
        await self._send_waiting()

    async def _send_waiting(self) -> None:
        """Send what waits, batch by batch, until one is refused."""
        while self._waiting and await self._send_batch():
            pass

    async def _send_batch(self) -> bool:
        batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        taken = False
        try:
            taken = await self._lanes.run("the collector", REQUEST_SECONDS, self._thd_send, batch)
        except DeadlineExceeded:
            pass
        finally:
            if not taken:
                self._lose(len(batch))
        if taken and self._failing:
            self._failing = False
            _log.info("{where} accepts spans again; {lost} were lost", where=self._where, lost=self.lost)
        return taken

    def _lose(self, count: int) -> None:
        self.lost += count
        if count and not self._failing and not self._stopped:
            self._failing = True
            _log.warn(
                "{where} does not accept spans: they are dropped until it does; the level debug shows why",
                where=self._where,
            )
