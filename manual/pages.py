# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/ as the generator takes them.

On the site all pages lie in one directory, those of the tree's top too, so links between them are written
anew. The navigation is docs/index.md itself: each of its headings is a part of it, each of its items a page,
and what else an item links to are the pages below that one.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

INDEX = "index.md"
MADE = {
    "Understand": ("interfaces.md",)
}  # pages of the site that are not in docs/, by the part that has them
# Pages that are not in docs/, by their names on the site.
TOP = {
    "CHANGELOG.md": "CHANGELOG.md",
    "CODE_OF_CONDUCT.md": "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "txgrpc.md": "txgrpc/README.md",
}
_SITE_NAME = {place: name for name, place in TOP.items()}
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
_WHOLE = re.compile(r"(?<!!)\[([^\]]+)\]\((?![a-z]+:|#)([^)\s#]+)\)")
_ENTRY = re.compile(r"^- .*(?:\n  .*)*", re.MULTILINE)
_PAGE = re.compile(r"\]\(([^)#:]+\.md)\)")
_PART = re.compile(r"^## (.+)$", re.MULTILINE)


class BadPage(Exception):
    """A page can't be made part of the site; the message says why."""


def prepare(tree: Path, source: Path) -> None:
    """Write the pages, and the files that they show, into a fresh directory.

    :raise BadPage: a link leads to no file of the tree."""
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(tree / "docs", source)
    for name, place in TOP.items():
        shutil.copy(tree / place, source / name)
    for page in sorted(source.glob("*.md")):
        origin = tree / TOP[page.name] if page.name in TOP else tree / "docs" / page.name
        text = relinked(origin.read_text(), origin, tree)
        for name in _others(text):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree / name, source / name)
        page.write_text(text)
    listed = parts((source / INDEX).read_text())
    _append(source / INDEX, navigation(listed))
    for entries in listed.values():
        for name, below in entries.items():
            if below:
                _append(source / name, _toctree(below))


def relinked(text: str, origin: Path, tree: Path) -> str:
    """Return a page whose links are those of the site.

    :param origin: where it is in the tree.
    :raise BadPage: a link leads to no file of the tree.
    """

    def target(found: re.Match[str]) -> str:
        place = (origin.parent / found[1]).resolve()
        if not place.is_relative_to(tree.resolve()) or not place.exists():
            raise BadPage(f"{origin.relative_to(tree)}: there is no {found[1]}")
        name = str(place.relative_to(tree.resolve()))
        return _SITE_NAME.get(name, name.removeprefix("docs/"))

    def words(found: re.Match[str]) -> str:
        # Whatever a directory of the tree has, the site has no page of it.
        return found[1] if (origin.parent / found[2]).is_dir() else found[0]

    return _LINK.sub(target, _WHOLE.sub(words, text))


def _append(page: Path, text: str) -> None:
    page.write_text(page.read_text() + text)


def _others(text: str) -> Iterator[str]:
    """Return the files outside of docs/ that a page of the site links to."""
    for name in _LINK.findall(text):
        if name.startswith(("contrib/", "infranetes/", "infranetes_", "txgrpc/", "vmserver/")):
            yield name


def parts(index: str) -> Mapping[str, Mapping[str, Sequence[str]]]:
    """Return the pages that docs/index.md has below each of its headings, and below each page its own."""
    pieces = _PART.split(index)
    found = {}
    for heading, text in zip(pieces[1::2], pieces[2::2], strict=True):
        items = [_PAGE.findall(item) for item in _ENTRY.findall(text)]
        found[heading] = {pages[0]: pages[1:] for pages in items if pages}
    return found


def navigation(listed: Mapping[str, Iterable[str]]) -> str:
    """Return the generator's own lists of pages, which are not shown on the page."""
    return "".join(
        _toctree((*pages, *MADE.get(heading, ())), f":caption: {heading}\n")
        for heading, pages in listed.items()
    )


def _toctree(pages: Iterable[str], options: str = "") -> str:
    names = "\n".join(name.removesuffix(".md") for name in pages)
    return f"\n```{{toctree}}\n:hidden:\n{options}\n{names}\n```\n"
