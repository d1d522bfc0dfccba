# SPDX-License-Identifier: Apache-2.0
"""What a site holds to: all that a page needs is in the site, and every link leads somewhere."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import attrs

# What a browser fetches by itself when it shows a page, and what only a click does.
_FETCHED = {"script": "src", "img": "src", "source": "src", "iframe": "src", "link": "href"}
_NOT_FETCHED = frozenset({"canonical", "index", "search", "next", "prev", "author", "alternate", "genindex"})


@attrs.define
class _Page(HTMLParser):
    """The links and anchors of one page."""

    links: list[str] = attrs.field(factory=list)
    fetched: list[str] = attrs.field(factory=list)
    anchors: set[str] = attrs.field(factory=set)

    def __attrs_pre_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        attribute = _FETCHED.get(tag, "")
        if attribute in found and not _NOT_FETCHED & set(found.get("rel", "").split()):
            self.fetched.append(found[attribute])


def faults(site: Path) -> Iterator[str]:
    """Return what is wrong with the pages of a site, a line each."""
    site = site.resolve()
    pages = {path: _read(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site)
        for target in page.fetched:
            if urlsplit(target).netloc or urlsplit(target).scheme in ("http", "https"):
                yield f"{name} fetches {target}, which is not of this site"
            elif not urlsplit(target).scheme and not _place(path, target).exists():
                yield f"{name} needs {target}, which is not there"
        for target in page.links:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            place = _place(path, target) if parts.path else path
            if not place.exists():
                yield f"{name} links to {target}, which is not there"
            elif parts.fragment and place in pages and unquote(parts.fragment) not in pages[place].anchors:
                yield f"{name} links to {target}, and that page has no such part"
    for path in sorted(site.rglob("*.css")):
        for line in path.read_text(errors="replace").split("url(")[1:]:
            if line.lstrip("'\"").startswith(("http:", "https:", "//")):
                yield f"{path.relative_to(site)} fetches {line.split(')')[0]}, which is not of this site"


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text())
    return page


def _place(page: Path, target: str) -> Path:
    place = (page.parent / unquote(urlsplit(target).path)).resolve()
    return place / "index.html" if place.is_dir() else place
