# SPDX-License-Identifier: Apache-2.0
"""Growing pauses."""

from __future__ import annotations

from itertools import islice

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.concurrency import backoff


class BackoffTests(SynchronousTestCase):
    def test_doubles_up_to_the_longest(self) -> None:
        self.assertEqual([*islice(backoff(0.5, 3), 5)], [0.5, 1, 2, 3, 3])

    def test_another_factor(self) -> None:
        self.assertEqual([*islice(backoff(1, 10, factor=3), 4)], [1, 3, 9, 10])

    def test_the_first_is_not_above_the_longest(self) -> None:
        self.assertEqual([*islice(backoff(5, 3), 2)], [3, 3])

    def test_jitter_takes_away_a_part(self) -> None:
        chances = iter([0.0, 0.5, 1.0])
        pauses = backoff(4, 4, jitter=0.5, chance=lambda: next(chances))
        self.assertEqual([*islice(pauses, 3)], [4, 3, 2])

    def test_jitter_by_chance_stays_in_its_bounds(self) -> None:
        for pause in islice(backoff(4, 4, jitter=0.25), 100):
            self.assertTrue(3 <= pause <= 4, pause)

    def test_never_overflows(self) -> None:
        self.assertEqual(next(islice(backoff(0.1, 60), 5000, None)), 60)
