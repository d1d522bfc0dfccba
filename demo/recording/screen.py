# SPDX-License-Identifier: Apache-2.0
"""What each line of a terminal showed, from when until when. The terminal is pyte's."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pyte

from demo.recording.cast import Cast

TOGETHER = 0.04  # seconds within which nobody sees one change after the other


class TooTall(ValueError):
    """A program wrote more lines than its terminal has, so the first ones have gone."""


@attrs.frozen
class Shown:
    """What one line showed for a while.

    :ivar row: of the terminal, from 0. :ivar begin: in seconds. :ivar end: None: until the end and after it.
    """

    row: int
    text: str
    begin: float
    end: float | None = None


def shown(cast: Cast) -> Sequence[Shown]:
    """Return what each line showed, top to bottom, then by time; empty ones are left out.

    :raise TooTall: the terminal is too low for all of it."""
    terminal = pyte.HistoryScreen(cast.columns, cast.rows, history=cast.rows, ratio=0.5)
    stream = pyte.Stream(terminal)
    now: list[Shown | None] = [None] * cast.rows
    found: list[Shown] = []
    for at, text in _together(cast):
        terminal.dirty.clear()
        stream.feed(text)
        if terminal.history.top:
            raise TooTall(f"`{cast.command}` wrote more than {cast.rows} lines: use a taller terminal")
        for row in sorted(terminal.dirty):
            line, before = terminal.display[row].rstrip(), now[row]
            if before is not None and before.text == line:
                continue
            if before is not None:
                found.append(attrs.evolve(before, end=at))
            now[row] = Shown(row, line, at) if line else None
    found += [each for each in now if each is not None]
    return sorted(found, key=lambda each: (each.row, each.begin))


def _together(cast: Cast) -> list[tuple[float, str]]:
    """Return what was written, with what came at about the same time in one piece."""
    pieces: list[tuple[float, str]] = []
    for each in cast.outputs:
        if pieces and each.at - pieces[-1][0] < TOGETHER:
            pieces[-1] = (pieces[-1][0], pieces[-1][1] + each.text)
        else:
            pieces.append((each.at, each.text))
    return pieces
