# SPDX-License-Identifier: Apache-2.0
"""How long the messages of one channel keep the reactor."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from txgrpc.turns import Turns


class TurnsTests(SynchronousTestCase):
    """Two that never have enough, on one channel."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.turns = Turns(self.clock, 0.005)
        self.worked: list[str] = []

    async def work(self, name: str, pieces: int) -> None:
        for _ in range(pieces):
            resting = self.turns.rest()
            if resting is not None:
                await resting
            self.worked.append(name)
            self.clock.rightNow += 0.002

    def start(self, name: str, pieces: int) -> Deferred[Any]:
        return Deferred.fromCoroutine(self.work(name, pieces))

    def test_a_turn_is_over_after_its_time_and_they_take_turns(self) -> None:
        one = self.start("a", 7)
        self.assertEqual(self.worked, ["a"] * 3)
        two = self.start("b", 4)
        self.assertEqual(self.worked, ["a"] * 3)
        self.clock.advance(0)
        self.assertEqual("".join(self.worked), "aaa" + "aaa" + "bbb" + "a" + "b")
        self.successResultOf(one)
        self.successResultOf(two)

    def test_all_that_comes_in_one_turn_of_the_reactor_shares_it(self) -> None:
        self.start("a", 2)
        self.start("b", 2)
        self.start("c", 2)
        self.assertEqual("".join(self.worked), "aab")
        self.clock.advance(0)
        self.assertEqual("".join(self.worked), "aabbcc")

    def test_there_is_nothing_left_to_do_once_nothing_comes(self) -> None:
        self.start("a", 1)
        self.clock.advance(0)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_what_comes_after_a_pause_begins_at_once(self) -> None:
        for _ in range(2):
            one = self.start("a", 1)
            self.successResultOf(one)
            self.clock.advance(1.0)

    def test_who_no_longer_waits_leaves_the_line(self) -> None:
        self.start("a", 3)
        gone, stays = self.start("b", 1), self.start("c", 1)
        gone.cancel()
        self.failureResultOf(gone)
        self.clock.advance(0)
        self.successResultOf(stays)
        self.assertEqual("".join(self.worked), "aaac")
        alone = self.start("d", 10)
        alone.cancel()
        self.failureResultOf(alone)
        self.clock.advance(0)
        self.assertEqual(self.clock.getDelayedCalls(), [])
