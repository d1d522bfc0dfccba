# SPDX-License-Identifier: Apache-2.0
"""Senders wait for each other, and all of them yield to everything else."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.services.pace import Pace

WORK = 0.004  # seconds that each takes


class PaceTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.pace = Pace(self.clock)
        self.done: list[tuple[int, float]] = []

    def come(self, *numbers: int) -> None:
        for number in numbers:
            turn = self.pace.turn()
            if turn is None:
                self.work(number)
            else:
                turn.addCallback(self.after_turn, number)

    def after_turn(self, _: None, number: int) -> None:
        self.work(number)

    def work(self, number: int) -> None:
        self.done.append((number, self.clock.seconds()))
        self.clock.rightNow += WORK

    def numbers(self) -> list[int]:
        return [number for number, _ in self.done]

    def test_a_few_have_their_turn_at_once(self) -> None:
        self.come(1, 2, 3)
        self.assertEqual(self.numbers(), [1, 2, 3])
        self.clock.advance(0)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_many_have_several_turns_of_the_reactor_in_their_order(self) -> None:
        self.come(*range(8))
        self.assertEqual(self.numbers(), [0, 1, 2])
        self.clock.callLater(0, self.work, -1)  # others have their turn between them
        self.clock.advance(0)
        self.assertEqual(self.numbers(), [0, 1, 2, 3, 4, 5, -1, 6, 7])

    def test_who_comes_while_others_wait_comes_after_them(self) -> None:
        self.come(*range(5))
        turn = self.pace.turn()
        assert turn is not None
        self.come(5)
        turn.addCallback(lambda _: self.come(6))  # in the same turn of the reactor
        while len(self.done) < 7:
            self.clock.advance(0)
        self.assertEqual(self.numbers(), [0, 1, 2, 3, 4, 5, 6])

    def test_after_much_there_is_a_rest_and_then_all_is_as_it_was(self) -> None:
        self.come(*range(20))
        while len(self.done) < 20:
            self.clock.advance(0)
        self.clock.advance(0)
        ended = self.clock.seconds()
        self.come(20)
        self.assertEqual(len(self.done), 20)
        self.clock.advance(1)
        self.assertEqual(self.numbers()[-1], 20)
        self.assertGreaterEqual(self.done[-1][1], ended + 0.1)
        self.clock.advance(1)
        self.clock.advance(0)
        self.come(21)
        self.assertEqual(self.numbers()[-1], 21)

    def test_a_rest_has_an_end(self) -> None:
        self.come(*range(10_000))
        while len(self.done) < 10_000:
            self.clock.advance(0)
        self.clock.advance(0)
        self.come(10_000)
        self.clock.advance(1)
        self.assertEqual(self.numbers()[-1], 10_000)

    def test_who_waits_no_more_has_no_turn(self) -> None:
        self.come(0, 1, 2)
        turn = self.pace.turn()
        assert turn is not None
        turn.addErrback(lambda _: None)
        self.come(4)
        turn.cancel()
        self.clock.advance(0)
        self.assertEqual(self.numbers(), [0, 1, 2, 4])
