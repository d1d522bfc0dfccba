# SPDX-License-Identifier: Apache-2.0
"""Many nodes of one account, which serves fewer looks than they would make: their pauses grow."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.cloud.calls.calls import Calls
from infranetes.providers.cloud.calls.throttle import RateLimit
from infranetes.providers.cloud.calls.turns import CallQueue
from infranetes.providers.cloud.interface import Cloud, CloudError, CloudVM, ErrorKind
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.cloud.vms.ledger import Ledger
from infranetes.providers.cloud.vms.watch import Watcher
from infranetes.providers.interface import Instance, InstanceState
from infranetes_common.concurrency import start
from tests.support.clouds.token_bucket import TokenBucket

NODES = 40
SERVED = 0.5  # looks a second; the nodes would make 1.3


class _Account:
    """What serves the nodes. :ivar asked: when it was asked and served, :ivar refused: or refused."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.bucket = TokenBucket(10.0, SERVED, clock.seconds())
        self.asked: list[float] = []
        self.refused: list[float] = []

    def serves(self) -> bool:
        served = self.bucket.has_one(self._clock.seconds())
        (self.asked if served else self.refused).append(self._clock.seconds())
        if served:
            self.bucket.take()
        return served


class _Node:
    """A node with one VM without an agent. :ivar lists: when its lists were served."""

    name = location = "nowhere"
    looks_per_list = 0

    def __init__(self, clock: Clock, account: _Account, number: int) -> None:
        self._clock = clock
        self._account = account
        chance = random.Random(number).random  # noqa: S311
        self._turns = CallQueue(clock, RateLimit(clock.seconds, 10.0, 50.0, chance))
        self.throttled = 0
        self.lists: list[float] = []
        self.ended_at: float | None = None
        self.vm = CloudVM(f"vm-{number}", "token", "pod", InstanceState.RUNNING, private_address="192.0.2.1")
        settings = CloudSettings()
        ledger = Ledger(clock.seconds, settings.settle_seconds)
        self.watcher: Watcher[None] = Watcher(
            clock,
            cast(Cloud[None], self),
            settings,
            cast(Calls[None], self),
            ledger,
            lambda vm: cast(Any, vm),
            lambda vm, why: None,
            is_agentless=lambda vm: True,
        )
        self.watcher.watchers.append(self._ended)
        ledger.record(self.vm)

    def _ended(self, instance: Instance) -> None:
        self.ended_at = self._clock.seconds()

    def _thd_list(self, driver: None) -> list[CloudVM]:
        self.lists.append(self._clock.seconds())
        return [self.vm]

    async def call(self, what: str, work: Callable[[None], Any], seconds: float | None = None) -> Any:
        """Make a call as `Calls` does: again after a pause, as long as it is refused and there is time."""
        until = self._clock.seconds() + cast(float, seconds)
        again = False
        while self._clock.seconds() + self._turns.expected(again=again) <= until:
            await self._turns.take(again=again)
            if self._account.serves():
                return work(None)
            self.throttled += 1
            self._turns.limit.throttled(0.0)
            again = True
        raise CloudError(ErrorKind.THROTTLED, "slow down")


class SharedAccountTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.account = _Account(self.clock)
        self.nodes = []
        for number in range(NODES):
            node = _Node(self.clock, self.account, number)
            running = start(node.watcher.run())
            running.addErrback(lambda failure: None)
            self.addCleanup(running.cancel)
            self.nodes.append(node)
            self.pass_(1.0)

    def pass_(self, seconds: float) -> None:
        for _ in range(int(seconds * 4)):
            self.clock.advance(0.25)

    def test_the_account_serves_nearly_all_that_they_ask_for_once_they_have_slowed_down(self) -> None:
        self.pass_(600.0)
        self.account.asked.clear()
        self.account.refused.clear()
        self.pass_(1800.0)
        asked, refused = len(self.account.asked), len(self.account.refused)
        self.assertLessEqual(asked, 1800.0 * SERVED + 10)
        self.assertGreaterEqual(asked, 1800.0 * SERVED * 0.7)
        self.assertLess(refused, asked / 2)

    def test_none_is_left_behind(self) -> None:
        self.pass_(1800.0)
        for node in self.nodes:
            pauses = [after - before for before, after in zip(node.lists, node.lists[1:], strict=False)]
            self.assertLess(max(pauses), 600.0)

    def test_ends_are_noticed_all_the_same(self) -> None:
        self.pass_(600.0)
        began = self.clock.seconds()
        for node in self.nodes[:10]:
            node.vm = CloudVM(node.vm.id, "token", "pod", InstanceState.ENDED)
        self.pass_(600.0)
        for node in self.nodes[:10]:
            self.assertLess(cast(float, node.ended_at) - began, 600.0)

    def test_they_are_as_quick_as_before_when_the_account_serves_more(self) -> None:
        self.pass_(600.0)
        self.assertGreater(max(node.watcher.stretch.factor for node in self.nodes), 1.5)
        self.account.bucket = TokenBucket(100.0, 100.0, self.clock.seconds())
        self.pass_(1800.0)
        self.assertEqual({node.watcher.stretch.factor for node in self.nodes}, {1.0})
