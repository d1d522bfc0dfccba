# SPDX-License-Identifier: Apache-2.0
"""Every page takes at most ten minutes to read."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from manual.reading import MOST_MINUTES, REFERENCES, WORDS_A_MINUTE, too_long, words
from tests.docs.test_links import PAGES

MOST = WORDS_A_MINUTE * MOST_MINUTES


class ReadingTests(SynchronousTestCase):
    """The pages of this tree."""

    def setUp(self) -> None:
        self.pages = {page.name: page.read_text() for page in PAGES}

    def test_each_takes_at_most_ten_minutes(self) -> None:
        self.assertEqual([*too_long(self.pages)], [])

    def test_no_other_than_long_ones_are_exempt(self) -> None:
        self.assertEqual({name for name in REFERENCES if words(self.pages[name]) <= MOST}, set())


class CheckTests(SynchronousTestCase):
    """Pages that are made for this."""

    def test_a_long_page_is_told_with_its_minutes_unless_it_is_a_reference(self) -> None:
        long = "# Page\n\n" + "word " * MOST
        [told] = too_long({"a.md": long, "b.md": "# Page\n\n" + "word " * (MOST - 1), "CHANGELOG.md": long})
        self.assertTrue(told.startswith("a.md takes 10.0 minutes to read"), told)

    def test_code_and_targets_of_links_are_not_read_and_tables_are(self) -> None:
        code = "    six seven\n\n```\neight\n```\n"
        table = "| four | `five` |\n|---|---|\n"
        self.assertEqual(words(f"# One\n\ntwo [three](seven-eight.md)\n\n{code}{table}"), 5)
