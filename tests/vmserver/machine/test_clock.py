# SPDX-License-Identifier: Apache-2.0
"""A machine's clock is set while nothing runs yet, and only forward from then on."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import InvalidArgument
from tests.vmserver.fake_clock import SECOND, FakeClock
from vmserver.machine.clock import SLACK_NANOS, MachineClock

NOW = 1_800_000_000 * SECOND


class SetTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.system = FakeClock(NOW)
        self.clock = MachineClock(self.system)

    def test_a_machine_in_which_nothing_runs_is_set_either_way(self) -> None:
        self.clock.set(NOW + SECOND)
        self.clock.set(NOW - SECOND)
        self.assertEqual(self.system.settings, [NOW + SECOND, NOW - SECOND])

    def test_any_other_is_set_forward_alone(self) -> None:
        self.clock.move_forward(NOW - 45 * SECOND)
        self.assertEqual(self.system.settings, [])
        self.clock.move_forward(NOW + 45 * SECOND)
        self.clock.move_forward(NOW + 45 * SECOND)
        self.assertEqual(self.system.settings, [NOW + 45 * SECOND])

    def test_one_that_is_right_is_left_alone(self) -> None:
        for change in (self.clock.set, self.clock.move_forward):
            change(NOW + SLACK_NANOS)
            change(NOW - SLACK_NANOS)
        self.assertEqual(self.system.settings, [])

    def test_times_of_today_alone_are_taken(self) -> None:
        for wrong in (0, 1, 2**62):
            for change in (self.clock.set, self.clock.move_forward):
                self.assertRaises(InvalidArgument, change, wrong)
