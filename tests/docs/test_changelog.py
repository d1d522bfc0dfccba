# SPDX-License-Identifier: Apache-2.0
"""The changelog: its form, and that branches which both add to it are merged without a conflict."""

from __future__ import annotations

import re
import shutil
import subprocess
from datetime import datetime
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common import __version__

TREE = Path(__file__).resolve().parents[2]
CHANGELOG = TREE / "CHANGELOG.md"
BULLET = "- "


def numbers(version: str) -> tuple[int, ...]:
    """Return a release's version as what can be compared."""
    return tuple(map(int, version.split(".")))


class ChangelogTests(SynchronousTestCase):
    def test_the_newest_release_is_the_version_or_comes_before_it(self) -> None:
        released = numbers(self.releases()[0][0])
        if ".dev" in __version__:
            self.assertLess(released, numbers(__version__.partition(".dev")[0]))
        else:
            self.assertEqual(released, numbers(__version__))

    def test_each_release_has_the_packages_date(self) -> None:
        packaged = dict(
            re.findall(
                r"^infranetes \((.+)\).*\n(?:\n|  .*\n)* -- .*>  (.*)$",
                (TREE / "debian/changelog").read_text(),
                flags=re.M,
            )
        )
        for version, date in self.releases():
            built = datetime.strptime(packaged.pop(version), "%a, %d %b %Y %H:%M:%S %z")
            self.assertEqual(date, f"{built:%d %B %Y}".lstrip("0"), version)
        unreleased = [__version__.replace(".dev", "~dev")] if ".dev" in __version__ else []
        self.assertEqual([*packaged], unreleased)

    def releases(self) -> list[tuple[str, str]]:
        """Return the version and the date of each release, the newest first."""
        found: list[tuple[str, str]] = re.findall(
            r"^## ([\d.]+) \((.+)\)$", CHANGELOG.read_text(), flags=re.M
        )
        return found

    def test_unreleased_changes_are_bullets_of_one_line_above_all_releases(self) -> None:
        headings = re.findall(r"^## (.+)$", CHANGELOG.read_text(), flags=re.M)
        self.assertEqual(headings[0], "Unreleased")
        unreleased = re.split(r"^## .+$", CHANGELOG.read_text(), flags=re.M)[1]
        for line in filter(None, unreleased.splitlines()):
            self.assertTrue(line.startswith(BULLET), line)

    def test_branches_that_add_a_change_each_are_merged(self) -> None:
        copy = Path(self.mktemp()).absolute()
        copy.mkdir()

        def git(*arguments: str) -> None:
            who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main")
            subprocess.run(["git", *who, *arguments], cwd=copy, check=True, capture_output=True)

        for file in (CHANGELOG, TREE / ".gitattributes"):
            shutil.copy(file, copy)
        changelog = copy / CHANGELOG.name
        heading = "## Unreleased\n\n"
        git("init")
        git("add", ".")
        git("commit", "--message=before")
        for branch in ("one", "two"):
            git("checkout", "-b", branch, "main")
            text = changelog.read_text()
            changelog.write_text(text.replace(heading, f"{heading}- What {branch} has changed.\n", 1))
            git("commit", "--all", f"--message={branch}")
        git("merge", "one")
        merged = changelog.read_text()
        for branch in ("one", "two"):
            self.assertEqual(merged.count(f"\n- What {branch} has changed.\n"), 1)
