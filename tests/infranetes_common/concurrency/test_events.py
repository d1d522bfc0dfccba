# SPDX-License-Identifier: Apache-2.0
"""What happens once, and what happens again and again."""

from __future__ import annotations

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.concurrency import Event, Notifier


class EventTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.event: Event[int] = Event()

    def test_the_value_before_and_after(self) -> None:
        before = self.event.wait()
        self.assertNoResult(before)
        self.assertFalse(self.event.happened)
        self.event.succeed(3)
        self.assertTrue(self.event.happened)
        self.assertEqual(self.successResultOf(before), 3)
        self.assertEqual(self.successResultOf(self.event.wait()), 3)

    def test_the_error_before_and_after(self) -> None:
        waiting = [self.event.wait(), self.event.wait()]
        self.event.fail(ValueError("no"))
        for each in [*waiting, self.event.wait()]:
            self.failureResultOf(each, ValueError)

    def test_only_the_first_counts(self) -> None:
        self.event.succeed(1)
        self.event.succeed(2)
        self.event.fail(ValueError("late"))
        self.assertEqual(self.successResultOf(self.event.wait()), 1)

    def test_an_error_that_nobody_waits_for_is_not_reported(self) -> None:
        self.event.fail(ValueError("no"))
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_cancelling_only_ends_one_wait(self) -> None:
        first, second = self.event.wait(), self.event.wait()
        first.cancel()
        self.failureResultOf(first, CancelledError)
        self.event.succeed(3)
        self.assertEqual(self.successResultOf(second), 3)

    def test_it_has_happened_for_who_is_woken(self) -> None:
        seen: list[bool] = []
        self.event.wait().addCallback(lambda _: seen.append(self.event.happened))
        self.event.succeed(3)
        self.assertEqual(seen, [True])

    def test_a_flag(self) -> None:
        flag: Event[None] = Event()
        waiting = flag.wait()
        flag.succeed(None)
        self.assertIsNone(self.successResultOf(waiting))


class NotifierTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.notifier = Notifier()

    def test_all_who_wait_are_woken_in_order_and_once(self) -> None:
        order: list[str] = []
        for word in "abc":
            self.notifier.wait().addCallback(lambda _, word: order.append(word), word)
        self.assertEqual(self.notifier.waiters, 3)
        self.notifier.notify()
        self.notifier.notify()
        self.assertEqual((order, self.notifier.waiters), (["a", "b", "c"], 0))

    def test_who_comes_later_waits_for_the_next_time(self) -> None:
        self.notifier.notify()
        waiting = self.notifier.wait()
        self.assertNoResult(waiting)
        self.notifier.notify()
        self.successResultOf(waiting)

    def test_who_waits_again_while_it_is_woken_waits_for_the_next_time(self) -> None:
        again: list[Deferred[None]] = []
        self.notifier.wait().addCallback(lambda _: again.append(self.notifier.wait()))
        self.notifier.notify()
        self.assertNoResult(again[0])

    def test_cancelling(self) -> None:
        first, second = self.notifier.wait(), self.notifier.wait()
        first.cancel()
        self.failureResultOf(first, CancelledError)
        self.assertEqual(self.notifier.waiters, 1)
        self.notifier.notify()
        self.successResultOf(second)

    def test_one_that_is_woken_may_cancel_the_next(self) -> None:
        first, second = self.notifier.wait(), self.notifier.wait()
        first.addCallback(lambda _: second.cancel())
        self.notifier.notify()
        self.failureResultOf(second, CancelledError)
