# SPDX-License-Identifier: Apache-2.0
"""The blocking guard's arithmetic, where a run of samples could not control when something happens."""

from __future__ import annotations

import time
from collections.abc import Callable

from twisted.trial.unittest import SynchronousTestCase

from tests.harness import blocking
from tests.harness.blocking import BlockingGuard, Times

LIMIT = 50.0
LONG = 60_000_000  # nanoseconds


def compute(nanoseconds: int) -> None:
    """Use that much of this thread's processor time."""
    until = time.thread_time_ns() + nanoseconds
    while time.thread_time_ns() < until:
        pass


class CollectionTests(SynchronousTestCase):
    """Garbage is collected when something is made, which the guard does too."""

    def setUp(self) -> None:
        self.guard = BlockingGuard(LIMIT)

    def collecting(self) -> Callable[[int, int], Times]:
        """Makes figures, and each time garbage is collected for too long."""
        collecting = False

        def make(computed: int, slept: int) -> Times:
            nonlocal collecting
            if not collecting:
                collecting = True
                self.guard._on_gc("start", {})
                compute(LONG)
                self.guard._on_gc("stop", {})
                collecting = False
            return Times(computed, slept)

        return make

    def test_a_collection_while_the_guard_makes_its_figures_is_nobodys_fault(self) -> None:
        self.patch(blocking, "Times", self.collecting())
        self.guard._measure(lambda: "it", lambda: None)
        self.assertEqual(self.guard.take(), [])

    def test_nor_is_one_at_the_borders_of_what_a_test_does_itself(self) -> None:
        def callback() -> None:
            with self.guard.not_counted():
                self.patch(blocking, "Times", self.collecting())

        self.guard._measure(lambda: "it", callback)
        self.assertEqual(self.guard.take(), [])

    def test_what_computes_beside_one_is_found(self) -> None:
        def callback() -> None:
            self.patch(blocking, "Times", self.collecting())
            compute(LONG)

        self.guard._measure(lambda: "it", callback)
        self.assertEqual(len(self.guard.take()), 1)
