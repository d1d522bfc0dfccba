# SPDX-License-Identifier: Apache-2.0
"""The blocking guard's arithmetic, in cases whose timing the samples of test_runner could not control."""

from __future__ import annotations

import time
from collections.abc import Callable

from twisted.trial.unittest import SynchronousTestCase

from tests.harness import blocking
from tests.harness.blocking import BlockingGuard, Times
from tests.harness.stalls import Stalls

LIMIT = 50.0
LONG = 60_000_000  # nanoseconds


def compute(nanoseconds: int) -> None:
    """Use that much of this thread's processor time."""
    until = time.thread_time_ns() + nanoseconds
    while time.thread_time_ns() < until:
        pass


class Stalled(Stalls):
    """Processors that always stood still for the given number of nanoseconds."""

    def __init__(self, stalled: int = 0) -> None:
        self.stalled = stalled

    def nanoseconds(self, processor: int, began: int, ended: int) -> int:
        return self.stalled


class StallTests(SynchronousTestCase):
    """The time that the machine's host took is not counted as a callback's computing."""

    def found_of(self, computed: int, stalled: int) -> list[float]:
        guard = BlockingGuard(LIMIT, Stalled(stalled))
        guard._measure(lambda: "it", compute, computed)
        return [each.computed for each in guard.take()]

    def test_a_callback_is_not_found_for_a_stall(self) -> None:
        self.assertEqual(self.found_of(LONG, LONG // 2), [])

    def test_it_is_for_what_it_computed_beside_one(self) -> None:
        (computed,) = self.found_of(2 * LONG, LONG // 2)
        self.assertGreaterEqual(computed, 1.5 * LONG / 1e6)
        self.assertLess(computed, 2 * LONG / 1e6)


class ProgramTests(SynchronousTestCase):
    """A thread that starts a program sleeps until it is executed: see `stacks`."""

    def found_of(self, sleep: Callable[[], None]) -> int:
        guard = BlockingGuard(LIMIT, Stalled())
        guard._stacks.start()
        self.addCleanup(guard._stacks.stop)
        guard._measure(lambda: "it", sleep)
        return len(guard.take())

    def test_a_callback_is_not_found_for_that(self) -> None:
        def _execute_child() -> None:  # as in subprocess
            time.sleep(0.2)

        def _posix_spawn() -> None:  # as in infranetes_common.spawning
            time.sleep(0.12)

        self.assertEqual(self.found_of(_execute_child), 0)
        self.assertEqual(self.found_of(_posix_spawn), 0)

    def test_it_is_for_any_other_sleep(self) -> None:
        self.assertEqual(self.found_of(lambda: time.sleep(0.2)), 1)


class CollectionTests(SynchronousTestCase):
    """Making any object may collect garbage, also when the guard makes its own."""

    def setUp(self) -> None:
        self.guard = BlockingGuard(LIMIT, Stalled())

    def collecting(self) -> Callable[[int, int], Times]:
        """Return a substitute for `Times` during whose calls garbage is collected for too long."""
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
