# SPDX-License-Identifier: Apache-2.0
"""The watchers of processors that stand still, beside a real-time program that lets nothing else run."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from twisted.trial.unittest import SynchronousTestCase

from tests.harness import stalls
from tests.harness.needs import needs_realtime

LONG = 0.04  # seconds
# It runs on the processor whose number is its argument, with a priority above the watchers'.
TAKES_IT = f"""
import os, sys, time
os.sched_setaffinity(0, {{int(sys.argv[1])}})
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(os.sched_get_priority_max(os.SCHED_FIFO)))
until = time.perf_counter() + {LONG}
while time.perf_counter() < until:
    pass
"""


class WatcherTests(SynchronousTestCase):
    """The watchers that all tests of this run share."""

    def setUp(self) -> None:
        self.stalls = stalls.watch()
        self.processor = min(os.sched_getaffinity(0))

    def stalled_meanwhile(self, program: str) -> float:
        """Return the seconds for which the processor stood still while a program ran on it."""
        began = time.perf_counter_ns()
        subprocess.run([sys.executable, "-c", program, str(self.processor)], check=True, timeout=60)
        time.sleep(2 * stalls.INTERVAL_NANOS / 1e9)  # long enough for a watcher to wake
        return self.stalls.nanoseconds(self.processor, began, time.perf_counter_ns()) / 1e9

    @needs_realtime
    def test_a_processor_that_runs_no_watcher_stands_still(self) -> None:
        self.assertGreater(self.stalled_meanwhile(TAKES_IT), LONG / 2)

    def test_one_that_is_busy_does_not(self) -> None:
        """The best of three runs counts, because the processor may really stand still in one."""
        ordinary = TAKES_IT.replace("os.sched_setscheduler", "len, (0,) or ").replace(str(LONG), "0.2")
        self.assertLess(min(self.stalled_meanwhile(ordinary) for _ in range(3)), 0.03)

    def test_only_what_overlaps_counts(self) -> None:
        now = time.perf_counter_ns()
        self.assertEqual(self.stalls.nanoseconds(self.processor, now + 10**12, now + 2 * 10**12), 0)
        self.assertEqual(self.stalls.nanoseconds(os.cpu_count() or 1, 0, now), 0)
