# SPDX-License-Identifier: Apache-2.0
"""What the readers of a page lack of it. Does no I/O.

A page consists of parts: elements of HTML, each with an id of its own. A reader is sent the parts that it
lacks in frames of a bounded size, and its next frame is made only when it has taken the one before. What
changes several times meanwhile is sent once, as it is then. So nothing accumulates for a slow reader: it is
behind, and has one frame to read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import attrs

MAX_FRAME = 64 * 1024  # characters of parts in one frame, beyond its first part


class Part(Protocol):
    """One part of a page, as a value: two that are equal have the same HTML."""

    def html(self, id: str) -> str:
        """Return its element, which has this id. Takes a while if it is large: call it in a thread."""


P = TypeVar("P")


@attrs.frozen
class _Shown:
    """A part as it is shown. :ivar change: the number of the change by which it became so."""

    part: object
    html: str
    change: int


class Feed:
    """The parts of one page as they are now, in their order. :ivar change: the number of the last change."""

    def __init__(self) -> None:
        self.change = 0
        self._shown: dict[str, _Shown] = {}

    def stale(self, parts: Mapping[str, P]) -> dict[str, P]:
        """Return those of `parts`, by their ids, whose HTML is not known: they are new, or have changed."""
        shown = self._shown
        return {id: part for id, part in parts.items() if id not in shown or shown[id].part != part}

    def put(self, parts: Mapping[str, object], html: Mapping[str, str]) -> None:
        """Show `parts` from now on, and no others. :param html: the HTML of those that are stale."""
        if not html and parts.keys() == self._shown.keys():
            return
        self.change += 1
        self._shown = {
            id: _Shown(part, html[id], self.change) if id in html else self._shown[id]
            for id, part in parts.items()
        }

    def lacking(self, has: dict[str, int]) -> Frame | None:
        """Return the next frame for a reader, and note in `has` that it has it; None: it lacks nothing.

        :param has: for each part that the reader has, the number of the change that it is from."""
        all_ids = () if has else tuple(self._shown)
        gone = [id for id in has if id not in self._shown]
        for id in gone:
            del has[id]
        parts: dict[str, str] = {}
        size = 0
        for id, shown in self._shown.items():
            if has.get(id) == shown.change:
                continue
            if parts and size + len(shown.html) > MAX_FRAME:
                break
            parts[id] = shown.html
            size += len(shown.html)
            has[id] = shown.change
        return Frame(parts, gone, all_ids) if parts or gone else None


@attrs.frozen
class Frame:
    """What a reader is sent at once.

    :ivar gone: the ids of parts that are not shown any more.
    :ivar all_ids: in a reader's first frame the ids of all parts, for it may have others from before.
    """

    parts: Mapping[str, str]
    gone: Sequence[str]
    all_ids: Sequence[str] = ()


def event(name: str, document: Mapping[str, object]) -> bytes:
    """Return a server-sent event. Its data is one line, for JSON escapes the ends of lines."""
    return f"event: {name}\ndata: {json.dumps(document, separators=(',', ':'))}\n\n".encode()
