# SPDX-License-Identifier: Apache-2.0
"""How late the reactor is."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.monitoring.lag import PERIOD, ReactorLag


class ReactorLagTests(SynchronousTestCase):
    """Lag is measured with a clock."""

    def setUp(self) -> None:
        self.clock, self.lags = Clock(), list[float]()
        self.lag = ReactorLag(self.clock, self.lags.append)
        self.lag.startService()

    def test_calls_in_time_and_late_ones(self) -> None:
        self.clock.advance(PERIOD)
        self.clock.advance(PERIOD + 0.25)
        self.assertEqual(self.lags, [0.0, 0.25])

    def test_it_ends(self) -> None:
        self.lag.stopService()
        self.assertEqual(self.clock.getDelayedCalls(), [])
