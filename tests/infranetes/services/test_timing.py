# SPDX-License-Identifier: Apache-2.0
"""When changes were received, and how long they took."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from infranetes.services.timing import MOST_NEWS, MOST_TIMES, News, RuleProgress, Times


class NewsTests(SynchronousTestCase):
    def test_the_first_change_that_somebody_lacks(self) -> None:
        news = News()
        self.assertIsNone(news.after(0))
        for number, heard_at in ((3, 10.0), (3, 11.0), (5, 12.0), (9, 13.0)):
            news.note(number, heard_at)
        found = {number: news.after(number) for number in (0, 2, 3, 4, 5, 8, 9, 20)}
        self.assertEqual(found, {0: 10.0, 2: 10.0, 3: 12.0, 4: 12.0, 5: 13.0, 8: 13.0, 9: None, 20: None})

    def test_only_the_last_ones_are_kept(self) -> None:
        news = News()
        for number in range(1, 3 * MOST_NEWS):
            news.note(number, float(number))
        self.assertEqual(news.after(0), 2.0 * MOST_NEWS)

    def test_looks_that_change_nothing_push_nothing_out(self) -> None:
        news = News()
        news.note(1, 1.0)
        for _ in range(2 * MOST_NEWS):
            news.note(1, 2.0)
        self.assertEqual(news.after(0), 1.0)

    def test_a_vm_is_current_once_it_is_known_to_lack_nothing(self) -> None:
        for number, behind, current in ((5, 0, True), (5, 1, False), (5, None, False), (-1, 0, False)):
            self.assertEqual(RuleProgress(number, behind, "", None, None, None, 0).current, current)


class TimesTests(SynchronousTestCase):
    def test_quantiles(self) -> None:
        times = Times()
        self.assertEqual((times.last, times.quantile(0.99), times.count), (None, None, 0))
        for seconds in range(100, 0, -1):
            times.add(float(seconds))
        self.assertEqual((times.last, times.quantile(0.99), times.quantile(0.5)), (1.0, 99.0, 50.0))
        few = Times()
        for seconds in range(1, 11):
            few.add(float(seconds))
        self.assertEqual([few.quantile(part) for part in (0.0, 0.1, 0.91, 1.0)], [1.0, 1.0, 10.0, 10.0])
        times.add(-1.0)  # the clock was set back
        self.assertEqual(times.last, 0.0)

    def test_only_the_last_ones_count(self) -> None:
        times = Times()
        for seconds in range(2 * MOST_TIMES):
            times.add(float(seconds))
        self.assertEqual((times.count, times.quantile(0.0)), (MOST_TIMES, float(MOST_TIMES)))
