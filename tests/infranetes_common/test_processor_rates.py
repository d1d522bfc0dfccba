# SPDX-License-Identifier: Apache-2.0
"""Rates between two samples."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.processor_rates import Rates
from infranetes_common.wire import vmserver as messages

SECOND = 10**9


def usage(at: float, used: float) -> Any:
    """Return a usage. Both arguments are seconds."""
    found = messages.Usage(time_nanos=int(at * SECOND))
    found.cpu.total_nanos = int(used * SECOND)
    return found


class RatesTests(SynchronousTestCase):
    """Nanoseconds of processor per second."""

    def setUp(self) -> None:
        self.rates = Rates()

    def rate(self, at: float, used: float, began: float = 0) -> int | None:
        sample = usage(at, used)
        self.rates.put("c", sample, int(began * SECOND))
        return sample.cpu.nano_cores.value if sample.cpu.HasField("nano_cores") else None

    def test_it_is_that_between_this_sample_and_the_last(self) -> None:
        self.assertIsNone(self.rate(100, 10))
        self.assertEqual(self.rate(110, 15), SECOND // 2)
        self.assertEqual(self.rate(112, 19), 2 * SECOND)
        self.assertEqual(self.rate(122, 19), 0)

    def test_the_first_rate_is_that_since_a_known_beginning(self) -> None:
        self.assertEqual(self.rate(110, 5, began=100), SECOND // 2)
        self.assertEqual(self.rate(120, 5, began=100), 0)

    def test_a_rate_covers_a_second_even_when_asked_for_more_often(self) -> None:
        self.rate(100, 0)
        self.rate(110, 10)
        for step in range(1, 10):
            self.assertEqual(self.rate(110 + step / 100, 10 + step / 100), SECOND)
        self.assertEqual(self.rate(112, 12), SECOND)

    def test_frequent_requests_get_a_recent_rate(self) -> None:
        self.rate(100, 0)
        for step in range(1, 50):
            self.rate(100 + step / 10, step / 10)
        last = None
        for step in range(50, 100):
            last = self.rate(100 + step / 10, 5)
        self.assertEqual(last, 0)

    def test_counters_that_were_reset_have_no_huge_rate(self) -> None:
        self.rate(100, 50)
        self.assertIsNone(self.rate(110, 1))
        self.assertEqual(self.rate(120, 2), SECOND // 10)

    def test_a_clock_that_was_set_back_resets_the_rate(self) -> None:
        self.rate(100, 50)
        self.assertIsNone(self.rate(50, 51))
        self.assertEqual(self.rate(60, 52), SECOND // 10)

    def test_other_keys_are_forgotten(self) -> None:
        for number in range(100):
            self.rates.put(str(number), usage(1, 1))
        self.rates.keep(["7", "new"])
        self.assertEqual(set(self.rates._samples), {"7"})

    @given(st.lists(st.tuples(st.integers(1, 10**19), st.integers(0, 2**63)), max_size=20))
    def test_no_rate_is_negative_or_fails(self, samples: list[tuple[int, int]]) -> None:
        rates = Rates()
        for at, used in samples:
            found = messages.Usage(time_nanos=min(at, 2**62))
            found.cpu.total_nanos = used
            rates.put("c", found)
