# SPDX-License-Identifier: Apache-2.0
"""A lock per key."""

from __future__ import annotations

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.concurrency import KeyedLock, start


class KeyedLockTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.locks: KeyedLock[str] = KeyedLock()
        self.inside: list[str] = []

    def hold(self, key: str, word: str) -> tuple[Deferred[None], Deferred[None]]:
        """Hold the key's lock until the first is fired; the second is the end."""
        leave: Deferred[None] = Deferred()

        async def held() -> None:
            async with self.locks.held(key):
                self.inside.append(word)
                await leave

        return leave, start(held())

    def test_one_key_is_held_by_one_at_a_time_in_order(self) -> None:
        leave_first, first = self.hold("a", "first")
        leave_second, second = self.hold("a", "second")
        leave_third, third = self.hold("a", "third")
        self.assertEqual(self.inside, ["first"])
        leave_first.callback(None)
        self.assertEqual(self.inside, ["first", "second"])
        leave_second.callback(None)
        leave_third.callback(None)
        self.assertEqual(self.inside, ["first", "second", "third"])
        for each in (first, second, third):
            self.successResultOf(each)
        self.assertEqual(self.locks.busy(), [])

    def test_one_that_comes_while_another_ends_inside_of_a_release_keeps_others_out(self) -> None:
        leave_first, _ = self.hold("a", "first")
        leave_second, second = self.hold("a", "second")
        second.addCallback(lambda _: self.hold("a", "third"))
        leave_second.callback(None)  # it waits for the first, and then not at all
        leave_first.callback(None)
        self.hold("a", "fourth")
        self.assertEqual(self.inside, ["first", "second", "third"])

    def test_keys_do_not_wait_for_each_other(self) -> None:
        leave_a, _ = self.hold("a", "a")
        leave_b, _ = self.hold("b", "b")
        self.assertEqual(self.inside, ["a", "b"])
        self.assertEqual(self.locks.busy(), ["a", "b"])
        leave_a.callback(None)
        self.assertEqual(self.locks.busy(), ["b"])
        leave_b.callback(None)

    def test_an_error_releases_it(self) -> None:
        leave, first = self.hold("a", "first")
        other, second = self.hold("a", "second")
        leave.errback(ValueError("no"))
        self.failureResultOf(first, ValueError)
        self.assertEqual(self.inside, ["first", "second"])
        other.callback(None)
        self.successResultOf(second)

    def test_who_is_cancelled_while_it_waits_gives_up_its_place(self) -> None:
        leave, first = self.hold("a", "first")
        _, second = self.hold("a", "second")
        other, third = self.hold("a", "third")
        second.cancel()
        self.failureResultOf(second, CancelledError)
        leave.callback(None)
        self.assertEqual(self.inside, ["first", "third"])
        other.callback(None)
        for each in (first, third):
            self.successResultOf(each)
        self.assertEqual(self.locks.busy(), [])

    def test_who_is_cancelled_while_it_holds_it_releases_it(self) -> None:
        _, first = self.hold("a", "first")
        leave, second = self.hold("a", "second")
        first.cancel()
        self.failureResultOf(first, CancelledError)
        self.assertEqual(self.inside, ["first", "second"])
        leave.callback(None)
        self.successResultOf(second)
