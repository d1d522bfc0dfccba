# SPDX-License-Identifier: Apache-2.0
"""The site as `make docs` builds it: without a network, whole, and of pages that one can read."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common import __version__
from manual.reading import MOST_MINUTES, REFERENCES, WORDS_A_MINUTE
from tests.harness.durations import slow
from tests.harness.needs import needs_netns

TREE = Path(__file__).resolve().parents[2]


class Article(HTMLParser):
    """The words of a page itself, but for commands and files."""

    def __init__(self) -> None:
        super().__init__()
        self.within: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("article", "pre"):
            self.within.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("article", "pre"):
            self.within.remove(tag)

    def handle_data(self, data: str) -> None:
        if self.within == ["article"]:
            self.words += data.split()


@needs_netns
@slow(15, "the generator reads a hundred pages")
class SiteTests(SynchronousTestCase):
    timeout = 600

    def test_it_is_built_without_a_network_and_each_page_takes_at_most_ten_minutes(self) -> None:
        site = Path(self.mktemp()).absolute()
        command = ["unshare", "--net", sys.executable, "-m", "manual", "--site", str(site)]
        done = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        root = site / __version__
        self.assertEqual(done.stdout, f"{root}/index.html\n")
        pages = [*root.glob("*.html")]
        self.assertGreater(len(pages), 100)
        long = {}
        for page in pages:
            if f"{page.stem}.md" in REFERENCES:
                continue
            article = Article()
            article.feed(page.read_text())
            if (minutes := len(article.words) / WORDS_A_MINUTE) > MOST_MINUTES:
                long[page.name] = minutes
        self.assertEqual(long, {})
        reference = "".join(page.read_text() for page in root.glob("interfaces-*.html"))
        for name in (
            "infranetes.providers.interface.IPodProvider.launch",
            "vmserver.containers.interface.ISession",
        ):
            self.assertTrue(f'id="{name}"' in reference, name)
        self.assertTrue("IPodProvider" in (root / "searchindex.js").read_text())
