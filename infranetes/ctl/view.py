# SPDX-License-Identifier: Apache-2.0
"""How a command's answer is to be printed: on a terminal or elsewhere, in which form, with which columns."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping

import attrs

TEXT, WIDE, NAME, JSON, YAML = "text", "wide", "name", "json", "yaml"
"""Forms of answers, as `--output` has them."""

RED, GREEN, YELLOW, FAINT = 31, 32, 33, 2  # as terminals number colours
_COLOURS: Mapping[str, int] = {
    **dict.fromkeys(("ready", "running", "live", "idle"), GREEN),
    **dict.fromkeys(("failed", "lost", "abandoned", "unreachable", "crashed", "Warning"), RED),
    **dict.fromkeys(("launching", "booting", "vacant", "stopping", "creating", "starting"), YELLOW),
    **dict.fromkeys(("removing", "troubled", "ending"), YELLOW),
    **dict.fromkeys(("stopped", "removed", "exited"), FAINT),
}


@attrs.frozen
class View:
    """How tables are printed.

    :ivar width: the columns of the terminal, which no line exceeds; None: there is no terminal.
    :ivar colour: whether states are coloured. :ivar headers: whether tables have heads, and sums below them.
    :ivar wide: whether they have the columns that are left out otherwise.
    """

    width: int | None = None
    colour: bool = False
    headers: bool = True
    wide: bool = False

    def painted(self, cell: str, text: str) -> str:
        """Return a text in the colour that a cell's word has."""
        code = _COLOURS.get(cell) if self.colour else None
        return text if code is None else f"\x1b[{code}m{text}\x1b[0m"


PLAIN = View()


def view_of(options: argparse.Namespace) -> View:
    """Return the view that a command line asks for, on the terminal if standard output is one."""
    terminal = sys.stdout.isatty() and not getattr(options, "json", False)
    environment = os.environ
    return View(
        width=shutil.get_terminal_size().columns if terminal else None,
        colour=terminal and not environment.get("NO_COLOR") and environment.get("TERM") not in (None, "dumb"),
        headers=not getattr(options, "no_headers", False),
        wide=getattr(options, "form", TEXT) == WIDE,
    )
