# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/ become those of a site: links, and the navigation."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from manual.pages import TOP, BadPage, navigation, parts, prepare, relinked


class LinkTests(SynchronousTestCase):
    """A tree of two pages, and what they link to."""

    def setUp(self) -> None:
        self.tree = Path(self.mktemp()).resolve()
        (self.tree / "docs").mkdir(parents=True)
        (self.tree / "contrib").mkdir()
        (self.tree / "contrib/a.yaml").write_text("a: 1\n")
        (self.tree / "txgrpc").mkdir()
        for name in TOP.values():
            (self.tree / name).write_text(
                "# Top\n\n[a](/docs/a.md#one)\n".replace("/docs", "../docs" if "/" in name else "docs")
            )
        self.page("index.md", "# Home\n\n## Start\n\n- [A](a.md): words\n- [Change](../CHANGELOG.md)\n")
        self.page(
            "a.md",
            "# A\n\n## One\n\n[top](../SECURITY.md) [b](../contrib/a.yaml) [c](https://example.org/x.md)\n",
        )

    def page(self, name: str, text: str) -> None:
        (self.tree / "docs" / name).write_text(text)

    def prepared(self, name: str) -> str:
        source = self.tree / "build"
        prepare(self.tree, source)
        return (source / name).read_text()

    def test_links_between_pages_lead_to_their_places_on_the_site(self) -> None:
        self.assertIn(
            "[top](SECURITY.md) [b](contrib/a.yaml) [c](https://example.org/x.md)", self.prepared("a.md")
        )
        self.assertIn("[a](a.md#one)", self.prepared("SECURITY.md"))
        self.assertEqual((self.tree / "build/contrib/a.yaml").read_text(), "a: 1\n")

    def test_a_link_to_a_directory_is_its_words(self) -> None:
        self.page("a.md", "# A\n\n[the chart](../contrib) and [b](../contrib/a.yaml)\n")
        self.assertIn("the chart and [b](contrib/a.yaml)", self.prepared("a.md"))

    def test_a_link_that_leads_nowhere_is_told_with_its_page(self) -> None:
        self.page("a.md", "[b](gone.md#part)")
        with self.assertRaisesRegex(BadPage, r"^docs/a\.md: there is no gone\.md$"):
            self.prepared("a.md")

    def test_a_link_out_of_the_tree_is_refused(self) -> None:
        with self.assertRaisesRegex(BadPage, "there is no ../../etc"):
            relinked("[a](../../etc)", self.tree / "docs/a.md", self.tree)

    def test_the_navigation_is_the_index(self) -> None:
        self.assertIn(":caption: Start\n\na\nCHANGELOG\n```", self.prepared("index.md"))
        listed = parts("## Understand\n\n- [A](a.md)\n- [B](b.md): c\n")
        self.assertIn("a\nb\ninterfaces\n", navigation(listed))

    def test_what_else_an_item_links_to_is_below_its_page(self) -> None:
        items = "- [A](a.md): its [b](b.md)\n  and [c](c.md)\n- [D](d.md)\n"
        self.page("index.md", f"# Home\n\n## Run\n\n{items}")
        for name in "bcd":
            self.page(f"{name}.md", f"# {name}\n")
        self.assertTrue(self.prepared("a.md").endswith("\n```{toctree}\n:hidden:\n\nb\nc\n```\n"))
        self.assertIn(":caption: Run\n\na\nd\n```", self.prepared("index.md"))
        self.assertEqual(self.prepared("b.md"), "# b\n")
