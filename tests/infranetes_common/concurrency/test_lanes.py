# SPDX-License-Identifier: Apache-2.0
"""Work that hangs keeps no other waiting, however much of it hangs."""

from __future__ import annotations

import threading

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import TestCase

from infranetes_common.concurrency import Lanes, still_alive
from infranetes_common.errors import DeadlineExceeded
from infranetes_common.reactors import installed
from tests.support.waiting import until

reactor = installed()
SIZE = 2
SOON = 0.3
PATIENCE = 20.0


class LaneTests(TestCase):
    def setUp(self) -> None:
        self.lanes = Lanes(reactor, "tests", SIZE)
        self.answers = threading.Event()
        self.addCleanup(self.lanes.close)
        self.addCleanup(self.answers.set)
        self.done: list[str] = []

    def hang(self, lane: str, seconds: float = PATIENCE) -> Deferred[bool]:
        return self.lanes.run(lane, seconds, self.answers.wait)

    def do(self, lane: str, word: str, seconds: float = PATIENCE) -> Deferred[None]:
        return self.lanes.run(lane, seconds, self.done.append, word)

    async def test_results_and_errors_come_back(self) -> None:
        self.assertEqual(await self.lanes.run("a", PATIENCE, divmod, 7, 2), (3, 1))
        with self.assertRaises(ZeroDivisionError):
            await self.lanes.run("a", PATIENCE, divmod, 7, 0)

    async def test_any_number_may_hang(self) -> None:
        hanging = [self.hang(f"hanging-{number}") for number in range(4 * SIZE)]
        await self.do("other", "done")
        self.assertFalse(any(each.called for each in hanging))
        self.answers.set()
        for each in hanging:
            self.assertTrue(await each)
        names = [one for one in threading.enumerate() if "infranetes-tests" in one.name]
        await until(lambda: len([one for one in names if one.is_alive()]) <= SIZE, "surplus threads end")

    async def test_a_lanes_pieces_are_done_one_after_the_other(self) -> None:
        first = self.hang("a")
        rest = [self.do("a", str(number)) for number in range(5)]
        await self.do("b", "b")
        self.assertEqual(self.done, ["b"])
        self.answers.set()
        await first
        for each in rest:
            await each
        self.assertEqual(self.done, ["b", *"01234"])

    async def test_who_waits_is_told_in_time_and_the_next_one_at_once(self) -> None:
        with self.assertRaises(DeadlineExceeded) as caught:
            await self.hang("/srv/gone", SOON)
        self.assertIn("/srv/gone does not answer", str(caught.exception))
        self.failureResultOf(self.do("/srv/gone", "not begun"), DeadlineExceeded)
        self.lanes.later("/srv/gone", lambda: self.done.append("tidied"))
        self.answers.set()
        await until(lambda: self.done == ["tidied"], "what was left is done")
        await self.do("/srv/gone", "again")
        self.assertEqual(self.done, ["tidied", "again"])

    async def test_what_gets_on_is_waited_for(self) -> None:
        def slow() -> str:
            while not self.answers.wait(SOON / 10):
                still_alive()
            return "done"

        result = self.lanes.run("slow", SOON, slow)
        with self.assertRaises(DeadlineExceeded):
            await self.hang("hanging", 5 * SOON)
        self.assertFalse(result.called)
        self.answers.set()
        self.assertEqual(await result, "done")
        still_alive()

    async def test_what_is_cancelled_before_it_began_is_never_done(self) -> None:
        first, second = self.hang("a"), self.do("a", "second")
        for each in (second, first):  # the second one's turn would come with the end of the first
            each.cancel()
            self.failureResultOf(each, CancelledError)
        hanging = [self.hang(f"hanging-{number}") for number in range(SIZE)]
        await self.do("b", "b")  # the thread of the first counts no more
        self.answers.set()
        await self.do("a", "third")
        self.assertEqual(self.done, ["b", "third"])
        for each in hanging:
            await each

    async def test_closed_it_waits_for_nothing(self) -> None:
        waiting = [self.hang("a"), self.do("a", "never")]
        await self.do("b", "b")
        self.lanes.close()
        waiting += [self.do("b", "never"), self.do("c", "never")]
        for each in waiting:
            self.failureResultOf(each, DeadlineExceeded)
        self.answers.set()
        threads = [one for one in threading.enumerate() if "infranetes-tests" in one.name]
        await until(lambda: not any(one.is_alive() for one in threads), "the threads end")
        self.assertEqual(self.done, ["b"])
