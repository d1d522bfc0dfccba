# SPDX-License-Identifier: Apache-2.0
"""What README and docs point to is there."""

from __future__ import annotations

import re
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

TREE = Path(__file__).resolve().parents[2]
PAGES = [
    TREE / "README.md",
    TREE / "CHANGELOG.md",
    TREE / "CODE_OF_CONDUCT.md",
    TREE / "CONTRIBUTING.md",
    TREE / "SECURITY.md",
    *sorted((TREE / "docs").glob("*.md")),
]


class LinkTests(SynchronousTestCase):
    def test_every_link_leads_to_a_file(self) -> None:
        for page in PAGES:
            for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
                if "://" not in target:
                    self.assertTrue((page.parent / target).exists(), f"{page.name}: {target}")

    def test_every_link_to_a_part_of_a_page_leads_to_a_heading(self) -> None:
        for page in PAGES:
            for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text()):
                if "://" not in target:
                    self.assertIn(
                        anchor, _anchors(page.parent / (target or page.name)), f"{page.name}: {target}"
                    )

    def test_every_page_can_be_reached_from_the_index_and_that_from_the_readme(self) -> None:
        linked = {*re.findall(r"\]\(([^)#/]+\.md)", (TREE / "docs/index.md").read_text()), "index.md"}
        self.assertEqual(linked, {page.name for page in (TREE / "docs").glob("*.md")})
        self.assertIn("](docs/index.md)", (TREE / "README.md").read_text())

    def test_every_make_target_that_is_named_exists(self) -> None:
        targets = set(re.findall(r"^([a-z0-9-]+):", (TREE / "Makefile").read_text(), flags=re.M))
        for page in PAGES:
            text = page.read_text()
            for target in re.findall(r"(?:`|^ {4})make ([a-z0-9-]+)", text, flags=re.M):
                self.assertIn(target, targets, page.name)

    def test_every_path_in_the_table_of_the_architecture_exists(self) -> None:
        text = (TREE / "docs" / "architecture.md").read_text()
        text = text.split("\n## Where things are\n")[1].split("\n## ")[0]
        for path in re.findall(r"^\| `([^`]+)` \|", text, flags=re.M):
            self.assertTrue((TREE / path).exists(), path)

    def test_every_module_on_the_ways_through_the_code_exists(self) -> None:
        ways = "".join((TREE / "docs" / page).read_text() for page in ("ways.md", "held-pods.md"))
        named = re.findall(r"`([\w/]+(?:\.py|/))`", ways)
        self.assertGreater(len(named), 30)
        for path in named:
            self.assertTrue(any((root / path).exists() for root in (TREE, TREE / "infranetes")), path)


def _anchors(page: Path) -> set[str]:
    """What links to the headings of a page call them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
