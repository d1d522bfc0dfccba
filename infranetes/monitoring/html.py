# SPDX-License-Identifier: Apache-2.0
"""What the pages have in common: their frame, and the elements that they are made of.

Whatever is shown becomes HTML here, by twisted.web's templates, which escape every text. A page is made in
two ways: as a document, for browsers without scripts too, in which moments are ages; and in parts, whose HTML
is the same whenever they are made, and in which moments are times that the page's script shows as ages.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import TypeGuard, TypeVar, cast

import attrs
from twisted.python.failure import Failure
from twisted.web.template import Tag, flattenString, tags

from infranetes_common.redaction import redacted_beginning

HTML = "text/html; charset=utf-8"
CSS = "text/css; charset=utf-8"
JAVASCRIPT = "text/javascript; charset=utf-8"
POLICY = (  # the pages' Content-Security-Policy
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
DOCTYPE = b"<!DOCTYPE html>\n"
REFRESH_SECONDS = 10
MAX_TEXT = 2000  # characters of one text
SHORT = 13  # characters of an id, as crictl shows it
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))

Cell = Tag | str
T = TypeVar("T")


@attrs.frozen
class Part:
    """A part of a page, which has an id: see `infranetes.monitoring.live.feed.Part`."""

    def tag(self, now: float | None) -> Tag:
        """Return its element. :param now: seconds since 1970 UTC; None: moments are shown as times."""
        raise NotImplementedError

    def html(self, id: str) -> str:
        return flattened(self.shown(id, None)).decode()

    def shown(self, id: str, now: float | None) -> Tag:
        """Return its element with its id. What is in it is cleaned."""
        return self.cleaned().tag(now)(id=id)

    def cleaned(self) -> Part:
        """Return it with texts that are bounded, printable, and without secrets, which errors may quote."""
        return cleaned(self)


def thd_own_file(name: str) -> bytes:
    """Return one of the files that the pages load. Reads it: call this in a thread."""
    return (files("infranetes.monitoring") / name).read_bytes()


def document(title: str, root: str, attributes: Mapping[str, str], *content: Cell) -> bytes:
    """Return a page. This takes a while: call it in a thread.

    :param root: the way from it to the first page, such as ``../``. :param attributes: of its body."""
    refresh = element("meta", {"http-equiv": "refresh", "content": str(REFRESH_SECONDS)})
    page = tags.html(
        tags.head(
            tags.meta(charset="utf-8"),
            tags.meta(name="viewport", content="width=device-width"),  # else phones pretend to be 980 wide
            tags.noscript(refresh),
            tags.title(f"{title}: Infranetes"),
            tags.link(rel="icon", href="data:,"),  # none, which browsers would ask for
            tags.link(rel="stylesheet", href=f"{root}style.css"),
            tags.script(src=f"{root}page.js"),
        ),
        element("body", attributes, *content),
        lang="en",
    )
    return DOCTYPE + flattened(page)


def flattened(tag: Tag) -> bytes:
    """Return the HTML of an element without Deferreds."""
    pages: list[bytes | Failure] = []
    flattenString(None, tag).addBoth(pages.append)  # fires at once: there are no Deferreds in it
    (page,) = pages
    if isinstance(page, Failure):
        page.raiseException()
    return page


def cleaned(value: T) -> T:
    """Return a value in which every text, at any depth, is bounded, printable and without secrets."""
    return cast(T, _cleaned(value))


def _cleaned(value: object) -> object:
    if isinstance(value, str):
        return printable(redacted_beginning(value, MAX_TEXT))
    if isinstance(value, list | tuple):
        return type(value)(map(_cleaned, value))
    if _has_fields(value):
        fields = {each.name: _cleaned(getattr(value, each.name)) for each in attrs.fields(type(value))}
        return type(value)(**fields)
    return value


def printable(text: str) -> str:
    """Return a text in which what is not printable, but for the ends of lines, is a question mark."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in "\n\t" else "?" for each in text)


def _has_fields(value: object) -> TypeGuard[attrs.AttrsInstance]:
    return attrs.has(type(value))


# ---- elements


def element(name: str, attributes: Mapping[str, str], *content: Cell) -> Tag:
    """Return an element of any name, with any attributes, unlike those of `tags`."""
    tag = Tag(name, children=list(content))
    for attribute, value in attributes.items():
        tag.attributes[attribute] = value
    return tag


def section(title: Cell, *content: Cell) -> Tag:
    """Return a section with its heading. What is wider than the window scrolls sideways, by keys too."""
    head, name = (title, "pods") if isinstance(title, Tag) else (tags.h2(title), title)
    wide = {"class": "wide", "tabindex": "0", "role": "region", "aria-label": name}
    return tags.section(head, element("div", wide, *content))


def table(heads: Sequence[str], rows: Iterable[Tag], body: Mapping[str, str] | None = None) -> Tag:
    """Return a table. :param body: the attributes of its body."""
    columns = [element("th", {"scope": "col"}, head) for head in heads]
    return tags.table(tags.thead(tags.tr(*columns)), element("tbody", body or {}, *rows))


def row(heads: Sequence[str], cells: Sequence[Cell]) -> Tag:
    """Return a row whose cells know their heads, which a narrow window shows in them."""
    return tags.tr(*[_cell(head, cell) for head, cell in zip(heads, cells, strict=True)])


def _cell(head: str, cell: Cell) -> Tag:
    return element("td", {"data-head": f"{head}: "} if head else {}, *([cell] if cell else []))


def rows_or(heads: Sequence[str], rows: Iterable[Sequence[Cell]], empty: str) -> Tag:
    """Return a table, or a paragraph if it would have no rows."""
    made = [row(heads, cells) for cells in rows]
    return table(heads, made) if made else tags.p(empty, class_="empty")


def facts(entries: Iterable[tuple[str, Cell]]) -> Tag:
    """Return a description list of these names and values. Empty values are left out."""
    return tags.dl(*[tags.div(tags.dt(name), tags.dd(value)) for name, value in entries if value])


def mark(text: str, *, good: bool) -> Tag:
    """Return a word that is good or bad."""
    return tags.span(text, class_="good" if good else "bad")


def short_id(id: str) -> Tag:
    """Return the beginning of an id, with all of it for those who point at it."""
    return tags.code(id[:SHORT], title=id)


def age(at: float, now: float | None) -> Tag:
    """Return how long ago a moment was. :param at: seconds since 1970 UTC. :param now: as of `Part.tag`."""
    return _moment(at, now, "age", "")


def ago(at: float, now: float | None) -> Tag:
    """Return the same with the word."""
    return _moment(at, now, "ago", " ago")


def _moment(at: float, now: float | None, kind: str, word: str) -> Tag:
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
    words = when if now is None else duration(now - at) + word
    return element("time", {"datetime": when, "title": when, "class": kind}, words)


def duration(seconds: float) -> str:
    """Return a duration in its largest unit."""
    for unit, name in _UNITS:
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return "0 s"


# ---- what is around a page's content


def controls(now: float) -> Tag:
    """Return when the page was made, and what its script adds to that: whether it is live, and the mode."""
    made = tags.time(time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now)), " UTC", id="now")
    live = element("span", {"id": "live", "role": "status"})
    mode = element("button", {"id": "mode", "type": "button", "hidden": ""}, "mode")
    return tags.p(live, " ", made, " ", mode, class_="controls")


def keys(*meanings: tuple[str, str]) -> Tag:
    """Return what keys do, which the script shows."""
    entries = [
        tags.span(*[each for key in names.split() for each in (tags.kbd(key), " ")], f" {meaning}")
        for names, meaning in meanings
    ]
    return element("footer", {"id": "keys", "hidden": ""}, *entries)
