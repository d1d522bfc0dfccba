# SPDX-License-Identifier: Apache-2.0
"""Rate limits of calls to a cloud, and the circuit breaker."""

from __future__ import annotations

from functools import partial

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.cloud.calls.throttle import CircuitBreaker, RateLimit


class RateLimitTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.limit = RateLimit(self.clock.seconds, rate=10.0, burst=5.0, chance=lambda: 0.5)

    def test_a_burst_is_free_and_further_calls_are_spread(self) -> None:
        for _ in range(5):
            self.assertEqual(self.limit.wait(), 0.0)
            self.limit.take()
        for before in range(10):
            self.assertAlmostEqual(self.limit.wait(before), (before + 1) / 10)
        self.clock.advance(2.0)
        self.assertEqual(self.limit.wait(), 0.0)
        self.assertAlmostEqual(self.limit.wait(5), 0.1)

    def test_throttling_slows_down_and_time_restores_the_rate(self) -> None:
        self.limit.throttled(0)
        self.assertAlmostEqual(self.limit.current, 7.0)
        for _ in range(20):
            self.limit.throttled(0)
        self.assertAlmostEqual(self.limit.current, 1.0)
        self.clock.advance(2.0)
        self.assertAlmostEqual(self.limit.current, 5.0)
        self.clock.advance(100.0)
        self.assertEqual(self.limit.current, 10.0)

    def test_after_throttling_nodes_come_back_one_by_one(self) -> None:
        waits = []
        for chance in (0.0, 1.0):
            limit = RateLimit(self.clock.seconds, rate=10.0, burst=5.0, chance=partial(float, chance))
            limit.throttled(0)
            waits.append(limit.wait())
        self.assertGreater(waits[1], waits[0])

    def test_nothing_is_saved_up_in_a_pause(self) -> None:
        self.limit.throttled(60.0)
        self.clock.advance(60.0)
        self.assertAlmostEqual(self.limit.wait(), 0.1)
        self.clock.advance(0.2)
        self.assertAlmostEqual(self.limit.wait(4), 0.3)

    def test_retry_after_is_honoured(self) -> None:
        self.limit.throttled(7.0)
        self.assertGreaterEqual(self.limit.wait(), 7.0)
        self.clock.advance(4.0)
        self.assertGreaterEqual(self.limit.wait(), 3.0)


class CircuitTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.circuit = CircuitBreaker(self.clock.seconds, threshold=3, first=5.0, longest=20.0)

    def fail_often(self) -> None:
        for _ in range(3):
            self.assertEqual(self.circuit.wait(), 0.0)
            self.circuit.failed()

    def test_it_opens_after_failures_in_a_row_only(self) -> None:
        for _ in range(10):
            self.circuit.failed()
            self.circuit.failed()
            self.circuit.succeeded()
        self.assertFalse(self.circuit.is_open)
        self.fail_often()
        self.assertTrue(self.circuit.is_open)
        self.assertEqual(self.circuit.wait(), 5.0)

    def test_one_call_probes_and_closes_it(self) -> None:
        self.fail_often()
        self.clock.advance(5.0)
        self.assertEqual(self.circuit.wait(), 0.0)
        self.assertGreater(self.circuit.wait(), 0.0)  # others wait for the probe
        self.circuit.succeeded()
        self.assertEqual(self.circuit.wait(), 0.0)

    def test_each_failed_probe_doubles_the_pause_up_to_the_longest(self) -> None:
        self.fail_often()
        for pause in (10.0, 20.0, 20.0):
            self.clock.advance(self.circuit.wait())
            self.assertEqual(self.circuit.wait(), 0.0)
            self.circuit.failed()
            self.assertEqual(self.circuit.wait(), pause)

    def test_an_abandoned_probe_is_left_to_the_next_call(self) -> None:
        self.fail_often()
        self.clock.advance(5.0)
        self.circuit.wait()
        self.circuit.abandoned()
        self.assertEqual(self.circuit.wait(), 0.0)
