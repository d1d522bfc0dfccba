# SPDX-License-Identifier: Apache-2.0
"""What is kept of a console of which a cloud tells the end alone."""

from __future__ import annotations

import time

from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.cloud.guests.kept import ANSWER_BYTES, KEPT_BYTES, KeptConsole, following

LINES = b"".join(b"%06d words that a guest writes while it boots\r\n" % number for number in range(12000))


class FollowingTests(SynchronousTestCase):
    """What of an answer is new."""

    def test_an_answer_with_all_is_new_from_where_the_one_before_ended(self) -> None:
        self.assertEqual(following(b"", b"abc"), b"abc")
        self.assertEqual(following(b"abc", b"abcdef"), b"def")
        self.assertEqual(following(b"abc", b"abc"), b"")

    def test_a_window_that_moved_on_is_laid_over_the_one_before(self) -> None:
        self.assertEqual(following(LINES[:10000], LINES[500:12000]), LINES[10000:12000])

    def test_answers_that_do_not_overlap_are_told_apart(self) -> None:
        self.assertIsNone(following(LINES[:10000], LINES[10000:20000]))
        self.assertIsNone(following(LINES[:10000], b"another boot"))

    def test_a_guest_that_writes_the_same_for_ever_takes_no_time(self) -> None:
        began = time.process_time()
        following(b"a" * ANSWER_BYTES + b"b", b"a" * ANSWER_BYTES + b"c")
        following(b"ab" * (ANSWER_BYTES // 2) + b"c", b"ab" * (ANSWER_BYTES // 2) + b"d")
        self.assertLess(time.process_time() - began, 0.5)


class KeptConsoleTests(SynchronousTestCase):
    """The numbers of a console's bytes."""

    def test_what_is_told_again_is_not_added_again(self) -> None:
        kept = KeptConsole()
        self.assertTrue(kept.add(LINES[:3000]))
        for answer in (LINES[:3000], LINES[:1000], LINES[200:3000], b""):
            self.assertFalse(kept.add(answer), "it is what was told before, or older")
        self.assertTrue(kept.add(LINES[1000:4000]))
        self.assertEqual((kept.begin, kept.data), (0, LINES[:4000]))

    def test_what_was_missed_is_a_gap_in_the_numbers(self) -> None:
        kept = KeptConsole()
        kept.add(LINES[:3000])
        self.assertTrue(kept.add(LINES[5000:6000]))
        self.assertEqual((kept.begin, kept.end, kept.data), (3001, 4001, LINES[5000:6000]))

    def test_only_so_much_is_kept_and_its_numbers_go_on(self) -> None:
        kept = KeptConsole()
        for end in range(1000, len(LINES), 50000):
            kept.add(LINES[max(end - 100000, 0) : end])
        self.assertEqual(len(kept.data), KEPT_BYTES)
        self.assertEqual(kept.data, LINES[kept.begin : kept.end])
        kept.add(LINES)
        self.assertEqual(len(kept.data), KEPT_BYTES)

    def test_a_later_daemon_goes_on_with_it(self) -> None:
        kept = KeptConsole()
        kept.add(LINES[:3000])
        kept.add(LINES[1000:4000])
        again = KeptConsole.of(kept.content())
        self.assertEqual((again.begin, again.data), (0, LINES[:4000]))
        self.assertFalse(again.add(LINES[1000:4000]))
        self.assertTrue(again.add(LINES[2000:5000]))
        self.assertEqual(again.data, LINES[:5000])

    def test_a_file_that_is_none_is_told(self) -> None:
        for content in (b"", b"words", b"-1 0\n", b"0 5\nabc", b"0 -1\nabc", b"1\nabc"):
            self.assertRaises(ValueError, KeptConsole.of, content)
