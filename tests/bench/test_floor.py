# SPDX-License-Identifier: Apache-2.0
"""The floor of pods: its line to the guest, its clocks, and what it reports."""

from __future__ import annotations

import os

from twisted.internet.error import ConnectionDone
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase as TestCase

from bench.figures import Report
from bench.floor import STEPS, Step, _Port, _report, _Watch


class PortTests(TestCase):
    def test_a_line_may_arrive_in_pieces_and_before_it_is_asked_for(self) -> None:
        port = _Port()
        port.dataReceived(b"rea")
        first = port.line()
        self.assertNoResult(first)
        port.dataReceived(b"dy\nok\n")
        self.assertEqual(self.successResultOf(first), "ready")
        self.assertEqual(self.successResultOf(port.line()), "ok")

    def test_the_end_of_the_machine_fails_who_waits(self) -> None:
        port = _Port()
        waiting = port.line()
        port.connectionLost(Failure(ConnectionDone()))
        self.failureResultOf(waiting, ConnectionDone)


class WatchTests(TestCase):
    def test_a_step_has_the_processor_time_of_its_process_alone(self) -> None:
        watch = _Watch(os.getpid())
        watch.step()
        while (step := watch.step()).processor == 0.0:
            sum(range(10_000))
        self.assertGreater(step.seconds, 0.0)
        self.assertLess(_Watch(os.getppid()).step().processor, 1.0)


class ReportTests(TestCase):
    def test_the_medians_are_compared_with_the_floors(self) -> None:
        report = Report()
        taken = [dict.fromkeys(STEPS, Step(seconds, 2 * seconds)) for seconds in (3.0, 4.0, 50.0)]
        floors = [dict.fromkeys(STEPS, Step(seconds, seconds)) for seconds in (0.1, 2.0, 2.5)]
        _report(report, taken, floors)
        found = {figure.label: figure.value for figure in report.figures}
        self.assertEqual(found["RunPodSandbox"], 4.0)
        self.assertEqual(found["RunPodSandbox, floor"], 2.0)
        self.assertEqual(found["RunPodSandbox beside the floor's"], 2.0)
        self.assertEqual(found["RunPodSandbox: QEMU's processor beside the floor's"], 4.0)
