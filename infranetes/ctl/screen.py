# SPDX-License-Identifier: Apache-2.0
"""A terminal on which each text replaces the one before."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO

_HOME, _CLEAR_LINE, _CLEAR_BELOW, _CLEAR = "\x1b[H", "\x1b[K", "\x1b[J", "\x1b[2J"


class Screen:
    """Shows as much of a text as the terminal has room for."""

    def __init__(self, terminal: TextIO | None = None) -> None:
        self._terminal = terminal or sys.stdout
        self._cleared = False

    def show(self, text: str) -> None:
        """Show this in place of what was shown before."""
        columns, rows = shutil.get_terminal_size()
        lines = text.split("\n")
        if len(lines) > rows:
            lines = [*lines[: rows - 1], f"… {len(lines) - rows + 1} more lines"]
        begin = _HOME if self._cleared else _CLEAR + _HOME
        self._cleared = True
        # A line with colours is of a table, which fits.
        cut = [line if "\x1b" in line else line[:columns] for line in lines]
        shown = "\n".join(line + _CLEAR_LINE for line in cut)
        self._terminal.write(begin + shown + _CLEAR_BELOW)
        self._terminal.flush()
