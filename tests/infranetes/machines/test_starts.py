# SPDX-License-Identifier: Apache-2.0
"""Starts that share processors begin in turn: in order, no more at once than there are places."""

from __future__ import annotations

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.machines.starts import Starts
from infranetes_common.concurrency import start

PLACE, PATIENCE = 60.0, 100.0  # seconds


class StartsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.most = 1
        self.starts = Starts(self.clock, lambda: self.most)
        self.began: list[str] = []
        self.told: dict[str, tuple[int, int]] = {}

    def ask(self, id: str, urgent: bool = False) -> Deferred[None]:
        async def wait() -> None:
            await self.starts.turn(
                id, PLACE, PATIENCE, lambda *told: self.told.update({id: told}), urgent=urgent
            )
            self.began.append(id)

        return start(wait())

    def test_as_many_begin_at_once_as_there_are_places(self) -> None:
        self.most = 2
        for id in "abcd":
            self.ask(id)
        self.assertEqual(self.began, ["a", "b"])
        self.starts.end("b")
        self.assertEqual(self.began, ["a", "b", "c"])
        self.assertEqual((self.starts.under_way, self.starts.waiting), (2, 1))

    def test_any_number_without_a_bound_and_none_has_a_place(self) -> None:
        self.most = 0
        for id in "abc":
            self.ask(id)
        self.assertEqual(self.began, ["a", "b", "c"])
        self.assertEqual(self.starts.under_way, 0)

    def test_they_go_in_the_order_in_which_they_came(self) -> None:
        for id in "abcd":
            self.ask(id)
        for id in "abc":
            self.starts.end(id)
        self.assertEqual(self.began, ["a", "b", "c", "d"])

    def test_the_urgent_ones_go_before_others_in_the_order_in_which_they_came(self) -> None:
        for id, urgent in (("a", False), ("b", False), ("x", True), ("y", True)):
            self.ask(id, urgent)
        for id in "axy":
            self.starts.end(id)
        self.assertEqual(self.began, ["a", "x", "y", "b"])

    def test_whoever_has_a_place_does_not_wait_for_another_one(self) -> None:
        self.ask("a")
        self.ask("b")
        self.assertFalse(self.starts.must_wait("a"))
        self.ask("a")
        self.assertEqual(self.began, ["a", "a"])
        self.starts.end("a")
        self.assertEqual(self.began, ["a", "a", "b"])

    def test_a_place_ends_by_itself(self) -> None:
        self.ask("hangs")
        self.ask("b")
        self.clock.advance(PLACE - 1)
        self.assertEqual(self.began, ["hangs"])
        self.clock.advance(1)
        self.assertEqual(self.began, ["hangs", "b"])

    def test_its_time_begins_anew_with_each_step(self) -> None:
        self.ask("a")
        self.ask("b")
        self.clock.advance(PLACE - 1)
        self.starts.take("a", PLACE)
        self.clock.advance(PLACE - 30)
        self.assertEqual(self.began, ["a"])
        self.starts.take("a", 1.0)
        self.clock.advance(1)
        self.assertEqual(self.began, ["a", "b"])

    def test_one_that_takes_a_place_beyond_the_bound_counts(self) -> None:
        self.ask("a")
        self.ask("b")
        self.starts.take("claimed", PLACE)
        self.starts.end("a")
        self.assertEqual(self.began, ["a"])
        self.starts.end("claimed")
        self.assertEqual(self.began, ["a", "b"])

    def test_nobody_waits_longer_than_it_is_patient(self) -> None:
        self.ask("a")
        self.ask("b")
        self.ask("c")
        for _ in range(int(PATIENCE)):
            self.starts.take("a", PLACE)  # it gets on, and does not end
            self.assertEqual(self.began, ["a"])
            self.clock.advance(1)
        self.assertEqual(self.began, ["a", "b", "c"])
        self.assertEqual(self.starts.under_way, 3)
        self.ask("d")
        for id in "ab":
            self.starts.end(id)
        self.assertEqual(self.began, ["a", "b", "c"])  # one of three places was lent
        self.starts.end("c")
        self.assertEqual(self.began, ["a", "b", "c", "d"])

    def test_one_that_is_given_up_leaves_the_line(self) -> None:
        self.ask("a")
        given_up = self.ask("b")
        self.ask("c")
        given_up.cancel()
        self.failureResultOf(given_up, CancelledError)
        self.assertEqual(self.told["c"], (0, 1))
        self.starts.end("a")
        self.assertEqual(self.began, ["a", "c"])
        self.starts.end("c")
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_whoever_waits_is_told_how_many_are_before_it(self) -> None:
        self.most = 2
        for id in "abcd":
            self.ask(id)
        self.assertEqual(self.told, {"c": (0, 2), "d": (1, 2)})
        self.ask("container", urgent=True)
        self.assertEqual(self.told, {"container": (0, 2), "c": (1, 2), "d": (2, 2)})
        self.starts.end("a")
        self.assertEqual(self.told["d"], (1, 2))

    def test_an_end_of_what_has_no_place_changes_nothing(self) -> None:
        self.ask("a")
        self.ask("b")
        self.starts.end("b")
        self.starts.end("unknown")
        self.assertEqual(self.began, ["a"])

    def test_nobody_overtakes_the_line_when_there_is_more_room(self) -> None:
        for id in "ab":
            self.ask(id)
        self.most = 3
        self.ask("c")
        self.assertEqual(self.began, ["a"])
        self.starts.end("a")
        self.assertEqual(self.began, ["a", "b", "c"])

    def test_only_those_behind_are_told_of_one_that_joins_and_all_of_one_whose_patience_ends(self) -> None:
        self.ask("a")
        self.ask("b")
        self.clock.advance(1)
        self.ask("c")
        self.ask("d")
        self.told.clear()
        self.ask("e")
        self.assertEqual(self.told, {"e": (3, 1)})
        for _ in range(int(PATIENCE) - 1):
            self.starts.take("a", PLACE)
            self.clock.advance(1)
        self.assertEqual(self.told, {"c": (0, 2), "d": (1, 2), "e": (2, 2)})

    def test_a_higher_bound_holds_from_the_next_end_on(self) -> None:
        for id in "abcd":
            self.ask(id)
        self.most = 0
        self.starts.end("a")
        self.assertEqual(self.began, ["a", "b", "c", "d"])

    def test_after_a_stop_nobody_gets_a_place(self) -> None:
        self.ask("a")
        waiting, other = self.ask("b"), self.ask("c")
        self.starts.stop()
        self.starts.end("a")
        self.clock.advance(PLACE + PATIENCE)
        waiting.cancel()  # as each launch is, one after the other
        self.failureResultOf(waiting, CancelledError)
        self.assertEqual(self.began, ["a"])
        other.cancel()
        self.failureResultOf(other, CancelledError)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_after_a_stop_nobody_takes_a_place_either(self) -> None:
        self.starts.stop()
        self.starts.take("claimed", PLACE)
        self.assertEqual((self.starts.under_way, self.clock.getDelayedCalls()), (0, []))

    def test_many_that_go_at_once(self) -> None:
        for number in range(300):
            self.ask(f"{number}")
        self.most = 0
        self.starts.end("0")
        self.assertEqual(len(self.began), 300)


class IdleTests(SynchronousTestCase):
    """What waits until no pod starts."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.starts = Starts(self.clock, lambda: 1)
        self.calls: list[str] = []

    def call(self) -> None:
        self.calls.append("idle")

    def test_it_does_not_wait_where_none_does(self) -> None:
        self.assertTrue(self.starts.when_idle(self.call))
        self.starts.take("a", PLACE)
        self.starts.end("a")
        self.assertEqual(self.calls, [])

    def test_it_is_called_once_after_the_last_one(self) -> None:
        self.starts.take("a", PLACE)
        self.starts.take("b", PLACE)
        for _ in range(2):
            self.assertFalse(self.starts.when_idle(self.call))
        self.starts.end("a")
        self.assertEqual(self.calls, [])
        self.starts.end("b")
        self.assertEqual(self.calls, ["idle"])
        self.starts.take("c", PLACE)
        self.starts.end("c")
        self.assertEqual(self.calls, ["idle"])
