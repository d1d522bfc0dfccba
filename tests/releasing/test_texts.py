# SPDX-License-Identifier: Apache-2.0
"""What a release changes in the changelogs and the version."""

from __future__ import annotations

from datetime import UTC, datetime

from twisted.trial.unittest import SynchronousTestCase

from releasing import texts
from releasing.texts import NotReleasable

WHEN = datetime(2027, 3, 1, 12, 0, tzinfo=UTC)
CHANGELOG = "# Changelog\n\n## Unreleased\n\n- New.\n\n## 0.2.0 (27 November 2026)\n\n- Old.\n"
DEBIAN = (
    "infranetes (0.3.0~dev0) bookworm; urgency=medium\n\n  * New.\n\n"
    " -- A <a@example.org>  Sun, 29 Nov 2026\n\n"
    "infranetes (0.2.0) bookworm; urgency=medium\n\n  * Old.\n\n -- A <a@example.org>  Fri, 27 Nov 2026\n"
)


class ChangelogTests(SynchronousTestCase):
    def test_what_was_unreleased_is_the_release_and_nothing_is_unreleased(self) -> None:
        self.assertEqual(
            texts.released(CHANGELOG, "0.3.0", WHEN),
            CHANGELOG.replace("## Unreleased\n", "## Unreleased\n\n## 0.3.0 (1 March 2027)\n"),
        )

    def test_nothing_to_release_is_refused(self) -> None:
        for text in (CHANGELOG.replace("- New.\n\n", ""), CHANGELOG.replace("Unreleased", "Later")):
            with self.assertRaisesRegex(NotReleasable, "nothing to release"):
                texts.released(text, "0.3.0", WHEN)

    def test_a_version_that_is_not_newer_is_refused(self) -> None:
        for version in ("0.2.0", "0.1.9"):
            with self.assertRaisesRegex(NotReleasable, "not newer than 0.2.0"):
                texts.released(CHANGELOG, version, WHEN)
        texts.released(CHANGELOG, "0.10.0", WHEN)

    def test_what_is_no_release_is_refused(self) -> None:
        for version in ("", "0.3", "0.3.0.dev0", "v0.3.0", "0.3.0 ", "0.3.0\n"):
            with self.assertRaisesRegex(NotReleasable, "three numbers"):
                texts.numbers(version)


class DebianTests(SynchronousTestCase):
    def test_the_entry_on_top_becomes_the_releases_with_its_day(self) -> None:
        found = texts.packaged(DEBIAN, "0.3.0", WHEN)
        self.assertTrue(
            found.startswith("infranetes (0.3.0) bookworm; urgency=medium\n\n  * New.\n\n -- "), found
        )
        self.assertIn(">  Mon, 01 Mar 2027 00:00:00 +0000\n\ninfranetes (0.2.0) bookworm;", found)
        self.assertIn("  Fri, 27 Nov 2026\n", found)

    def test_a_tree_that_is_a_release_already_is_refused(self) -> None:
        with self.assertRaisesRegex(NotReleasable, "development version"):
            texts.packaged(DEBIAN.replace("~dev0", ""), "0.3.0", WHEN)

    def test_what_an_upgrade_asks_for_is_the_releases_too_if_it_asks_for_anything(self) -> None:
        self.assertTrue(texts.news(DEBIAN, "0.3.0", WHEN).startswith("infranetes (0.3.0) bookworm;"))
        nothing = DEBIAN.replace("~dev0", "")
        self.assertEqual(texts.news(nothing, "0.3.0", WHEN), nothing)

    def test_the_next_development_version_has_an_entry_on_top(self) -> None:
        found = texts.begun(DEBIAN, texts.following("0.3.0"), WHEN)
        self.assertTrue(found.startswith("infranetes (0.4.0~dev0) bookworm; urgency=medium\n"), found)
        self.assertTrue(found.endswith(DEBIAN))


class VersionTests(SynchronousTestCase):
    def test_it_is_replaced_and_what_is_said_of_it_stays(self) -> None:
        module = '"""Words."""\n\n__version__ = "0.3.0.dev0"  # of all\n'
        self.assertEqual(texts.version_of(module), "0.3.0.dev0")
        self.assertEqual(texts.with_version(module, "0.3.0"), module.replace(".dev0", ""))
