# SPDX-License-Identifier: Apache-2.0
"""A wrong clock is corrected while a pod runs, and never goes back."""

from __future__ import annotations

from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InvalidArgument, Unimplemented
from infranetes_common.wire import vmserver as messages
from tests.vmserver.fake_clock import SECOND, FakeClock
from vmserver.machine.system_clock import MAX_SLEW_TICKS, STA_UNSYNC, TICKS, KernelClock, Timex, kept
from vmserver.machine.timekeeping import STEP_NANOS, TOLERANCE_NANOS, Timekeeping
from vmserver.rpc.clock import ClockCalls

NOW = 1_800_000_000 * SECOND  # the node's time when a test begins
MILLI = 10**6


class TimekeepingTestCase(SynchronousTestCase):
    """A machine, and the node's time."""

    def setUp(self) -> None:
        self.node = NOW
        self.make(0)

    def make(self, ahead: int) -> None:
        """Make a machine whose clock is that far ahead of the node's."""
        self.system = FakeClock(self.node + ahead)
        self.restart()

    def restart(self) -> None:
        """Restart the agent."""
        self.reactor = Clock()
        self.agent = Timekeeping(self.reactor, self.system)

    def tell(self, within: int = 0) -> None:
        """Have the node read the clock and send the time. :param within: the uncertainty of that."""
        self.agent.correct(self.system.steady(), self.node - within, self.node + within)

    def pass_time(self, seconds: float, step: float = 0.02) -> None:
        """Let time pass: reactors count by the machine's clock, which must never go back."""
        for _ in range(round(seconds / step)):
            before = self.system.now()
            self.system.pass_time(step)
            self.node += round(step * SECOND)
            self.assertGreater(self.system.now(), before)
            self.reactor.advance((self.system.now() - before) / SECOND)

    @property
    def ahead(self) -> int:
        return self.system.now() - self.node


class CorrectTests(TimekeepingTestCase):
    def test_what_the_node_reads_is_the_steady_clock(self) -> None:
        self.assertEqual(self.agent.reading(), self.system.steady())

    def test_one_that_is_right_is_left_alone(self) -> None:
        for ahead in (0, TOLERANCE_NANOS, -TOLERANCE_NANOS):
            self.make(ahead)
            self.tell()
            self.assertEqual((self.system.ticks(), self.system.settings), (TICKS, []))

    def test_one_that_is_behind_runs_faster_until_it_is_right(self) -> None:
        self.make(-500 * MILLI)
        self.tell()
        self.assertGreater(self.system.ticks(), TICKS)
        self.pass_time(25)
        self.assertLessEqual(abs(self.ahead), TOLERANCE_NANOS)
        self.assertEqual((self.system.ticks(), self.system.settings), (TICKS, []))

    def test_one_that_is_ahead_runs_slower_until_it_is_right(self) -> None:
        for seconds in (0.015, 0.5, 3.0):
            self.make(round(seconds * SECOND))
            self.tell()
            self.assertLess(self.system.ticks(), TICKS)
            self.pass_time(max(25, 12 * seconds))
            self.assertLessEqual(abs(self.ahead), TOLERANCE_NANOS, seconds)
            self.assertEqual((self.system.ticks(), self.system.settings), (TICKS, []))

    def test_it_is_never_faster_or_slower_than_the_kernel_takes(self) -> None:
        for ahead in (3600 * SECOND, -STEP_NANOS):
            self.make(ahead)
            self.tell()
            self.assertLessEqual(abs(self.system.ticks() - TICKS), MAX_SLEW_TICKS)

    def test_a_machine_that_was_suspended_is_set_forward(self) -> None:
        self.make(-3600 * SECOND)
        self.tell()
        self.assertEqual((self.ahead, self.system.ticks()), (0, TICKS))
        self.assertEqual(len(self.system.settings), 1)

    def test_nothing_is_known_beyond_what_the_node_says(self) -> None:
        self.make(200 * MILLI)
        self.tell(within=250 * MILLI)
        self.assertEqual((self.system.ticks(), self.system.settings), (TICKS, []))
        self.tell(within=100 * MILLI)
        self.pass_time(25)
        self.assertApproximates(self.ahead, 100 * MILLI, TOLERANCE_NANOS)

    def test_saying_it_twice_or_late_changes_nothing(self) -> None:
        for ahead in (-5 * SECOND, -500 * MILLI, 500 * MILLI):
            self.make(ahead)
            steady, told = self.system.steady(), self.node
            self.pass_time(2)
            for _ in range(2):
                self.agent.correct(steady, told, told)
                self.pass_time(3)
            self.agent.correct(steady, told, told)
            self.pass_time(25)
            self.assertLessEqual(abs(self.ahead), TOLERANCE_NANOS)
            self.assertEqual(len(self.system.settings), int(ahead < -STEP_NANOS))

    def test_what_is_said_next_takes_the_place_of_what_was_said_before(self) -> None:
        self.make(3 * SECOND)
        self.tell()
        self.pass_time(5)
        self.system.set(self.node - 2 * SECOND)  # the machine was suspended
        self.tell()
        self.assertEqual((self.ahead, self.system.ticks()), (0, TICKS))
        self.pass_time(60)
        self.assertEqual((self.ahead, self.system.ticks()), (0, TICKS))

    def test_a_time_service_of_the_image_is_left_to_it(self) -> None:
        self.make(-3600 * SECOND)
        self.system.others_keep_it = True
        self.assertEqual(self.agent.reading(), 0, "the node is not to correct it")
        self.tell()
        self.assertEqual((self.system.ticks(), self.system.settings), (TICKS, []))

    def test_a_time_service_that_takes_the_clock_over_meanwhile_keeps_the_speed_that_it_gave(self) -> None:
        self.make(3 * SECOND)
        self.tell()
        self.pass_time(5)
        self.system.set_ticks(TICKS - 7)
        self.system.others_keep_it = True
        self.tell()
        self.pass_time(60)
        self.assertEqual((self.system.ticks(), self.reactor.getDelayedCalls()), (TICKS - 7, []))

    def test_what_a_time_service_no_longer_keeps_is_the_nodes_again(self) -> None:
        self.make(-500 * MILLI)
        self.system.others_keep_it = True
        self.tell()
        self.assertEqual((self.agent.reading(), self.system.ticks()), (0, TICKS))
        self.system.others_keep_it = False
        self.tell()
        self.assertEqual(self.agent.reading(), self.system.steady())
        self.assertGreater(self.system.ticks(), TICKS)


class RefusedTests(TimekeepingTestCase):
    def test_times_that_can_not_be(self) -> None:
        steady = self.system.steady()
        for earliest, latest in ((NOW, NOW - 1), (NOW, NOW + 61 * SECOND), (0, NOW), (NOW, 2**62), (0, 0)):
            self.assertRaises(InvalidArgument, self.agent.correct, steady, earliest, latest)

    def test_a_reading_of_long_ago_or_of_another_boot(self) -> None:
        steady = self.system.steady()
        self.assertRaises(FailedPrecondition, self.agent.correct, steady + SECOND, NOW, NOW)
        self.pass_time(61)
        self.assertRaises(FailedPrecondition, self.agent.correct, steady, NOW, NOW)

    def test_a_kernel_that_refuses_is_told(self) -> None:
        for ahead in (SECOND, -SECOND, -3 * SECOND):
            self.make(ahead)
            self.system.refuses = True
            with self.assertRaisesRegex(FailedPrecondition, "CAP_SYS_TIME"):
                self.tell()
            self.assertFalse(self.reactor.getDelayedCalls())

    def test_calls_hand_the_times_on(self) -> None:
        self.make(-3 * SECOND)
        request = messages.CorrectClockRequest(
            steady_nanos=self.system.steady(), earliest_nanos=NOW, latest_nanos=NOW
        )
        call: Any = None
        self.successResultOf(start(ClockCalls(self.agent).CorrectClock(request, call)))
        self.assertEqual(self.system.settings, [NOW])
        self.failureResultOf(start(ClockCalls(None).CorrectClock(request, call)), Unimplemented)


class EndedTests(TimekeepingTestCase):
    """The agent ends while it corrects the clock."""

    def setUp(self) -> None:
        super().setUp()
        self.make(3 * SECOND)
        self.tell()
        self.pass_time(5)

    def test_one_that_stops_has_it_run_at_its_own_speed(self) -> None:
        for _ in range(2):
            self.agent.stop()
        self.assertEqual((self.system.ticks(), self.reactor.getDelayedCalls()), (TICKS, []))

    def test_the_next_one_ends_what_a_killed_one_has_begun_and_goes_on_with_it(self) -> None:
        self.restart()
        self.assertNotEqual(self.system.ticks(), TICKS)
        for _ in range(2):
            self.agent.begin()
        self.assertEqual(self.system.ticks(), TICKS)
        self.tell()
        self.pass_time(40)
        self.assertLessEqual(abs(self.ahead), TOLERANCE_NANOS)

    def test_it_is_not_begun_anew_by_a_renewed_certificate(self) -> None:
        speed = self.system.ticks()
        self.agent.begin()
        self.assertEqual(self.system.ticks(), speed)

    def test_a_kernel_that_refuses_then_hinders_nothing(self) -> None:
        self.system.refuses = True
        self.agent.stop()
        self.restart()
        self.agent.begin()


class KeptTests(SynchronousTestCase):
    """What the kernel reports of its clock."""

    def kept(self, status: int, seconds: float) -> bool:
        return kept(Timex(status=status, maxerror=round(seconds * 1e6)))

    def test_it_is_kept_by_what_told_the_kernel_lately_that_it_has_a_server(self) -> None:
        self.assertTrue(self.kept(0, 0.001))
        self.assertTrue(self.kept(0, 0.05 + 2048 * 500e-6), "it is told each 2048 s, and will be now")

    def test_it_is_not_where_nothing_told_it_or_what_did_fell_silent(self) -> None:
        self.assertFalse(self.kept(STA_UNSYNC, 16.0))
        self.assertFalse(self.kept(STA_UNSYNC, 0.001), "what kept it has no server any more")
        self.assertFalse(self.kept(0, 0.05 + 4096 * 500e-6), "it was told an hour ago")


class KernelClockTests(SynchronousTestCase):
    """This machine's own clocks, which the test does not change."""

    def test_they_go_on(self) -> None:
        clock = KernelClock()
        before = clock.now(), clock.steady()
        self.assertGreater((clock.now(), clock.steady()), before)

    def test_their_speed_is_what_the_kernel_can_have(self) -> None:
        clock = KernelClock()
        self.assertLessEqual(abs(clock.ticks() - TICKS), MAX_SLEW_TICKS)
        self.assertIsInstance(clock.kept_by_others(), bool)
