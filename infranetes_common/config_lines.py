# SPDX-License-Identifier: Apache-2.0
"""The line of each key in a TOML file, which tomllib doesn't report.

tomllib does all the parsing; this module only finds where each statement ends: at the first line up to which
tomllib accepts it as a whole document.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping

_CLOSING = ("]", '"""', "'''")  # the last line of a statement of several lines has one of these

Path = tuple[str, ...]
"""The names that lead to a value. An element of a list has its number, from 1, as in errors."""


def lines_of(text: str) -> dict[str, int]:
    """Return the line of each dotted key in `text`, a TOML document. A table has the line of its header."""
    found: dict[str, int] = {}
    implied: dict[str, int] = {}
    counts: dict[Path, int] = {}  # the elements so far of each list of tables
    above: Path = ()
    for line, statement in _statements(text):
        table = tomllib.loads(statement)
        if not statement.lstrip().startswith("["):
            for path in _paths(table, above):
                found.setdefault(".".join(path), line)
            continue
        above = ()
        *parents, last = _header(table)
        for name in parents:
            above = (*above, name)
            if above in counts:
                above = (*above, str(counts[above]))
        above = (*above, last)
        found.setdefault(".".join(above), line)
        for number in range(1, len(above)):  # tables that the names of others imply
            implied.setdefault(".".join(above[:number]), line)
        if statement.lstrip().startswith("[["):
            counts[above] = counts.get(above, 0) + 1
            above = (*above, str(counts[above]))
            found.setdefault(".".join(above), line)
    return {**implied, **found}


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield each header, and each key with its value, with the number of its first line."""
    begun: list[str] = []
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        if not begun and (not line.strip() or line.lstrip().startswith("#")):
            continue
        begun.append(line)
        if len(begun) > 1 and not any(each in line for each in _CLOSING):
            continue
        statement = "\n".join(begun)
        try:
            tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue
        yield number - len(begun) + 1, statement
        begun = []


def _header(table: Mapping[str, object]) -> Iterator[str]:
    """Yield the names in a header, which tomllib has read as tables in each other."""
    inner: object = table
    while isinstance(inner, Mapping) and inner:
        ((name, inner),) = inner.items()
        yield name
        if isinstance(inner, list):
            return


def _paths(value: object, above: Path) -> Iterator[Path]:
    """Yield the paths of a table's contents, at any depth."""
    items: Iterator[tuple[str, object]] = iter(())
    if isinstance(value, Mapping):
        items = iter(value.items())
    elif isinstance(value, list):
        items = ((str(number), each) for number, each in enumerate(value, start=1))
    for name, each in items:
        yield (*above, name)
        yield from _paths(each, (*above, name))
