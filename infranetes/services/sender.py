# SPDX-License-Identifier: Apache-2.0
"""The sender that brings one VM's service proxy up to date, and keeps it up to date.

When a call begins the VM reports the number up to which it has the changes. The missing ones are sent in
parts, and later changes once the VM has reported that these are in force. So a slow VM is sent less often,
and each rule only in its latest state.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import Protocol

from twisted.internet.defer import Deferred, DeferredQueue
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.services.messages import Batches
from infranetes.services.pace import Pace
from infranetes.services.table import Change, RuleTable
from infranetes.services.timing import RuleProgress, Times
from infranetes_common.concurrency import Notifier, backoff, sleep, start
from infranetes_common.errors import InfranetesError, InvalidArgument, NotOffered
from infranetes_common.wire import vmserver

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0  # seconds between two failed calls

_log = Logger()


class IAgent(Protocol):
    """The part of the agent's client that a sender needs."""

    def service_rules(
        self, updates: AsyncIterator[vmserver.ServiceRulesUpdate]
    ) -> AsyncGenerator[vmserver.ServiceRulesState, None]:
        """Send updates; yield the state in force when the call begins and after each update."""


class RuleSender:
    """Keeps the rules of one VM equal to a table's.

    :param changed: notified when the table may have changed.
    :param batches: the table's batches. :param pace: schedules the sending. All senders share both.
    :ivar number: the number up to which the VM has the changes; -1: not known.
    :ivar trouble: why rules can't be sent to the VM now; "": they can be.
    """

    def __init__(
        self,
        clock: IReactorTime,
        agent: IAgent,
        table: RuleTable,
        changed: Notifier,
        batches: Batches,
        pace: Pace,
    ) -> None:
        self._clock = clock
        self._agent = agent
        self._table = table
        self._changed = changed
        self._batches = batches
        self._pace = pace
        self._told = Notifier()
        self._over = False  # no more is sent
        self._waiting: DeferredQueue[None] | None = None  # requests to send, in this call
        self._answered = False  # whether the VM has answered this call's last update, or its beginning
        self._known = -1  # the number that the VM answered last; -1: none of this table
        self._sent: int | None = None  # the number last sent in this call
        self._running: Deferred[None] | None = None
        self._heard_at: float | None = None
        self._times = Times()
        self.number = -1
        self.trouble = ""

    def start(self) -> None:
        """Begin to send."""
        self._running = start(self._run())
        self._running.addErrback(self._ended)

    def stop(self) -> None:
        """Stop sending. Idempotent."""
        self._over = True
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
        self._told.notify()

    def _ended(self, failure: Failure) -> None:
        if not self._over:
            _log.failure("sending rules of Services to a VM failed", failure=failure)

    async def when_told(self) -> None:
        """Wait until the VM has all rules, or is known to take none."""
        while self.number < 0 and not self._over:
            await self._told.wait()

    def progress(self) -> RuleProgress:
        """Return how far the VM is."""
        changes = self._table.since(self.number)
        heard = self._heard_at
        return RuleProgress(
            self.number,
            None if changes is None else self._lacked(changes),
            self.trouble,
            None if heard is None else max(self._clock.seconds() - heard, 0.0),
            self._times.last,
            self._times.quantile(0.99),
            self._times.count,
        )

    def _lacked(self, changes: Iterable[Change]) -> int:
        return sum(1 for _ in changes) + (self._table.ranges_number > self.number)

    async def _run(self) -> None:
        pauses = backoff(FIRST_PAUSE, LONGEST_PAUSE, jitter=0.5)
        while True:
            try:
                await self._call()
                trouble = "the agent ended the call"
            except NotOffered:
                self.trouble, self._over = "it has no service proxy", True
                self._told.notify()
                return
            except InfranetesError as error:
                trouble = str(error)
            if self.number >= 0:
                pauses = backoff(FIRST_PAUSE, LONGEST_PAUSE, jitter=0.5)
            self.number, self.trouble = -1, trouble
            await sleep(self._clock, next(pauses))

    async def _call(self) -> None:
        """Make one call and serve it until it ends."""
        self._answered, self._sent = False, None
        waiting: DeferredQueue[None] = DeferredQueue()
        self._waiting = waiting
        states = self._agent.service_rules(self._taken(waiting))
        following = start(self._follow(waiting))
        following.addErrback(lambda _: None)
        try:
            async for state in states:
                self._answer(state)
                if self._known >= 0:
                    self.number, self.trouble = self._known, ""
                    self._told.notify()
                self._send(waiting)
        finally:
            self._answered, self._waiting = False, None
            following.cancel()
            await states.aclose()

    def _answer(self, state: vmserver.ServiceRulesState) -> None:
        """Record the VM's answer. :raise InvalidArgument: it does not answer the last update."""
        ours = state.table == self._table.id
        if self._sent is not None and (self._answered or not ours or state.number != self._sent):
            raise InvalidArgument("the agent's answer does not match the rules that it was sent")
        now = self._clock.seconds()
        if self._sent is not None and self._known >= 0:
            heard_at = self._table.news.after(self._known)
            if heard_at is not None:
                self._times.add(now - heard_at)
        self._heard_at = now
        self._known = state.number if ours else -1
        self._answered = True

    async def _follow(self, waiting: DeferredQueue[None]) -> None:
        """Send changes as they happen, until the call has ended.

        It may end during a send, which cancels no wait: that is checked after each wait."""
        while True:
            await self._changed.wait()
            if self._waiting is not waiting:
                return
            self._send(waiting)

    def _send(self, waiting: DeferredQueue[None]) -> None:
        """Request a send, if the VM has answered the last update and lacks changes."""
        if self._table.complete and self._answered and self._known != self._table.number:
            self._answered = False
            waiting.put(None)

    async def _taken(self, waiting: DeferredQueue[None]) -> AsyncIterator[vmserver.ServiceRulesUpdate]:
        """Yield the messages to send, each in this VM's turn: what the VM lacks is determined only then."""
        while True:
            await waiting.get()
            await self._turn()
            batch = self._batches.since(self._known if self._known >= 0 else None)
            self._sent = batch.number
            yield batch.message(0)
            for place in range(1, len(batch)):
                await self._turn()
                yield batch.message(place)

    async def _turn(self) -> None:
        turn = self._pace.turn()
        if turn is not None:
            await turn
