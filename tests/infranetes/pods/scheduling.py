# SPDX-License-Identifier: Apache-2.0
"""When, and whether, what a daemon asks of the fakes is done and answered: at once, or as a seed chooses.

Give a `FakeNode` a `Scheduler`, and its provider, agents and store are as unkind as real ones: a request
takes time on its way, and so does its answer; either is lost, or what was asked for is done long after its
failure was answered; the provider's list lags behind; writes are done one after the other. The same seed
chooses the same again, so a failure is repeated from the seed in its message.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock

from infranetes.providers.interface import Instance
from infranetes_common.concurrency import shielded, sleep, start
from infranetes_common.errors import DeadlineExceeded, InfranetesError, Unavailable

T = TypeVar("T")
Work = Callable[[], Awaitable[T]]
"""What a request has the other side do."""

HANGING = 30.0  # seconds after which the agents' client gives up on a call
LONG = 45.0  # seconds that a slow cloud takes, longer than the daemons in the stories wait for an end
LATE = 25.0  # seconds until a launch that has failed has made its VM after all
LAG = 25.0  # seconds by which the provider's list may be late


class Kind:
    """Does everything at once, and answers at once."""

    clock: Clock

    async def ask_provider(self, name: str, work: Work[T]) -> T:
        """Make a request of the provider, which goes on with it when its caller has given up."""
        return await work()

    async def ask_agent(self, name: str, work: Work[T]) -> T:
        """Make a request of an agent, which may not have come to it when its caller gives up."""
        return await work()

    def write(self, work: Callable[[], Deferred[None]]) -> Deferred[None]:
        """Have the store do a write."""
        return work()

    def listed(self, instances: Mapping[str, Instance]) -> list[Instance]:
        """Return those VMs that the provider's list shows now."""
        return list(instances.values())

    def killed(self) -> None:
        """The daemon is killed: what it has asked for may still be done, and is never answered."""


class Fate(enum.Enum):
    """What becomes of a request."""

    DONE = "done"
    SLOW = "done slowly"
    REFUSED = "refused"
    LOST = "done, and the answer is lost"
    LATE = "failed, and done later"


class Scheduler(Kind):
    """Chooses from a seed what becomes of each request.

    :param troubles: how many requests come to grief; after those all is slow, and nothing fails.
    :ivar kind: whether everything is done at once for now. :ivar writing: whether writes are under way.
    :ivar late: whether that is done now for which nobody waits any more.
    :ivar story: what was done, with its time, for messages.
    """

    def __init__(self, seed: int, troubles: int = 3) -> None:
        self.random = Random(seed)  # noqa: S311
        self.kind = self.late = False
        self.story: list[str] = []
        self._troubles = troubles
        self._life: object = object()  # of the daemon that asks
        self._writes: list[tuple[Callable[[], Deferred[None]], Deferred[None]]] = []
        self.writing = False
        self._shown: dict[str, Instance] = {}
        self._due: dict[str, float] = {}  # when the list shows that a VM has come or gone

    def note(self, what: str) -> None:
        """Add a line to the story."""
        self.story.append(f"{self.clock.seconds():8.2f} {what}")

    # ---- requests

    async def ask_provider(self, name: str, work: Work[T]) -> T:
        if self.kind:
            return await work()
        return await shielded(self._request(name, work))

    async def _request(self, name: str, work: Work[T]) -> T:
        life, fate = self._life, self._fate(*Fate)
        await self._pass(fate)
        if fate is Fate.LATE and not name.startswith("launch"):
            fate = Fate.LOST
        if fate is Fate.REFUSED:
            self._fail(name, fate)
        if fate is Fate.LATE:
            self.clock.callLater(self.random.uniform(0, LATE), self._do_late, name, work)
            self._fail(name, fate)
        if life is not self._life and self.random.random() < 0.5:
            await Deferred()  # the daemon was killed before it had sent the request
        self.late = life is not self._life
        result = await work()
        self.late = False
        self.note(name)
        await self._pass()
        if life is not self._life:
            await Deferred()
        if fate is Fate.LOST:
            self._fail(name, fate)
        return result

    async def ask_agent(self, name: str, work: Work[T]) -> T:
        if self.kind:
            return await work()
        life, fate = self._life, self._fate(Fate.DONE, Fate.SLOW, Fate.REFUSED, Fate.LOST)
        try:
            await self._pass()
        except CancelledError:
            if self.random.random() < 0.5:
                self._do_late(name, work)
            raise
        if fate is Fate.REFUSED:
            self._fail(name, fate)
        if life is not self._life and self.random.random() < 0.5:
            await Deferred()
        result = await work()
        self.note(name)
        await self._pass()
        if life is not self._life:
            await Deferred()
        if fate is Fate.LOST:
            self._fail(name, fate)
        if fate is Fate.SLOW:
            await sleep(self.clock, HANGING)
            raise DeadlineExceeded(f"{name}: no answer within {HANGING:g} s")
        return result

    def _do_late(self, name: str, work: Work[object]) -> None:
        self.note(f"{name}, late")
        self.late = True
        late = start(_done(work))
        self.late = False
        late.addErrback(lambda failure: failure.trap(InfranetesError))

    def _fate(self, *fates: Fate) -> Fate:
        if not self._troubles or self.random.random() < 0.85:
            return Fate.DONE
        self._troubles -= 1
        return self.random.choice(fates)

    def _fail(self, name: str, fate: Fate) -> None:
        self.note(f"{name}: {fate.value}")
        raise Unavailable(f"{name}: {fate.value}")

    async def _pass(self, fate: Fate = Fate.DONE) -> None:
        """Let the time pass that a message takes; often none."""
        if fate is Fate.SLOW:
            await sleep(self.clock, LONG)
        elif (chance := self.random.random()) > 0.4:
            await sleep(self.clock, self.random.uniform(0, 5.0 if chance > 0.9 else 0.5))

    # ---- the store

    def write(self, work: Callable[[], Deferred[None]]) -> Deferred[None]:
        if self.kind:
            return work()
        answer: Deferred[None] = Deferred()
        self._writes.append((work, answer))
        if not self.writing:
            self.writing = True
            start(self._write_all(self._life)).addErrback(lambda failure: failure.raiseException())
        return answer

    async def _write_all(self, life: object) -> None:
        while self._writes and life is self._life:
            await self._pass()
            if life is not self._life:
                return
            work, answer = self._writes.pop(0)
            done = work()
            await self._pass()
            if life is self._life:
                done.chainDeferred(answer)
        if life is self._life:
            self.writing = False

    # ---- the list

    def listed(self, instances: Mapping[str, Instance]) -> list[Instance]:
        if self.kind:
            return list(instances.values())
        now = self.clock.seconds()
        for id in instances.keys() ^ self._shown.keys():
            lag = self._due.setdefault(id, now + max(0.0, self.random.uniform(-LAG, LAG)))
            if lag <= now:
                del self._due[id]
                if id in instances:
                    self._shown[id] = instances[id]
                else:
                    del self._shown[id]
        return [instances.get(id, shown) for id, shown in self._shown.items()]

    def killed(self) -> None:
        self.note("the daemon is killed")
        self._life = object()
        self._writes.clear()
        self.writing = False


async def _done(work: Work[object]) -> None:
    await work()
