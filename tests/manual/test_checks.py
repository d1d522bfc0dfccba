# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a site is told; one that has all that it needs has no fault."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from manual.__main__ import list_versions
from manual.checks import faults


class FaultTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.site = Path(self.mktemp())
        self.site.mkdir()
        (self.site / "a.css").write_text("b { background: url(data:x) }")
        self.page(
            "a.html", '<link rel="stylesheet" href="a.css"><h1 id="top">A</h1><a href="b.html#one">b</a>'
        )
        self.page(
            "b.html", '<h2 id="one">B</h2><a href="#one">here</a><a href="https://example.org">away</a>'
        )

    def page(self, name: str, text: str) -> None:
        (self.site / name).write_text(text)

    def test_a_whole_one_has_none(self) -> None:
        self.assertEqual([*faults(self.site)], [])

    def test_a_link_to_no_page_or_no_part(self) -> None:
        self.page("a.html", '<a href="c.html">c</a><a href="b.html#two">b</a><a href="#three">a</a>')
        self.assertEqual(
            [*faults(self.site)],
            [
                "a.html links to c.html, which is not there",
                "a.html links to b.html#two, and that page has no such part",
                "a.html links to #three, and that page has no such part",
            ],
        )

    def test_what_a_browser_would_fetch_elsewhere(self) -> None:
        self.page(
            "b.html",
            '<h2 id="one"></h2><script src="https://cdn.example/a.js"></script><img src="//x/a.png">',
        )
        (self.site / "a.css").write_text("@font-face { src: url('https://fonts.example/f.woff2') }")
        self.assertEqual(len([*faults(self.site)]), 3)
        self.assertTrue(all("which is not of this site" in each for each in faults(self.site)))

    def test_what_a_page_needs_and_is_not_there(self) -> None:
        self.page("b.html", '<h2 id="one"></h2><img src="gone.png">')
        self.assertEqual([*faults(self.site)], ["b.html needs gone.png, which is not there"])


class VersionTests(SynchronousTestCase):
    """The versions that lie beside each other."""

    def test_the_newest_is_first_and_a_release_is_what_one_comes_to(self) -> None:
        site = Path(self.mktemp())
        for name in ("0.9.0", "0.10.0", "0.11.0.dev0", "no-version-yet"):
            (site / name).mkdir(parents=True)
            if name[0] == "0":
                (site / name / "index.html").touch()
        list_versions(site)
        self.assertEqual((site / "versions.json").read_text(), '["0.11.0.dev0", "0.10.0", "0.9.0"]\n')
        self.assertIn("url=0.10.0/index.html", (site / "index.html").read_text())
