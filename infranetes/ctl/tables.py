# SPDX-License-Identifier: Apache-2.0
"""Text tables for infranetes-ctl."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import attrs

from infranetes.ctl.view import PLAIN, View

Json = dict[str, object]
_NANOS = 1e9
_GAP = "   "  # between columns, as kubectl has it
_YEAR = 365
_NARROWEST = 4  # to which columns are cut that need not be, before columns at the end are left out


@attrs.frozen
class Column:
    """A column of a list.

    :ivar may_lack: it is left out if all its cells are empty. :ivar wide: it is there with `-o wide` alone.
    :ivar least: on a narrow terminal, its cells are cut to this many characters; 0: they are not.
    :ivar gives_way: on a terminal that is still too narrow, the columns with the lowest number are left out
        first; 0: it stays.
    """

    name: str
    may_lack: bool = False
    wide: bool = False
    least: int = 0
    gives_way: int = 0


def listing(columns: Sequence[Column], rows: Iterable[Sequence[str]], view: View = PLAIN) -> str:
    """Return a table whose columns are as wide as their widest cell, if the terminal has room for them."""
    given = [[_printable(cell) for cell in row] for row in rows]
    kept = [
        number
        for number, column in enumerate(columns)
        if (view.wide or not column.wide) and not (column.may_lack and not any(row[number] for row in given))
    ]
    widths = {number: max(len(cell) for cell in _cells(columns, given, number, view)) for number in kept}
    if view.width is not None:
        widths = _fitting(columns, widths, view.width)
    lines = [[column.name for column in columns]] if view.headers else []
    lines += [[cell or "-" for cell in row] for row in given]
    return "\n".join(
        _line(line, widths, view if number or not view.headers else attrs.evolve(view, colour=False))
        for number, line in enumerate(lines)
    )


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], may_lack: Collection[str] = (), view: View = PLAIN
) -> str:
    """Return a table whose columns are as wide as their widest cell.

    :param may_lack: names of columns that are left out if all their cells are empty."""
    return listing([Column(name, may_lack=name in may_lack) for name in head], rows, view)


def _cells(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], number: int, view: View
) -> Iterable[str]:
    yield columns[number].name if view.headers else ""
    for row in rows:
        yield row[number] or "-"


def _fitting(columns: Sequence[Column], widths: dict[int, int], width: int) -> dict[int, int]:
    """Return the widths of the columns that fit the terminal, by their numbers."""
    fitted = dict(widths)
    leaving = [number for number in fitted if columns[number].gives_way]
    for number in sorted(leaving, key=lambda each: columns[each].gives_way):
        _shrink(columns, fitted, width)
        if _over(fitted, width) <= 0:
            return fitted
        del fitted[number]
        fitted |= {each: widths[each] for each in fitted}
    _shrink(columns, fitted, width)
    _shrink([attrs.evolve(column, least=_NARROWEST) for column in columns], fitted, width)
    while len(fitted) > 1 and _over(fitted, width) > 0:
        del fitted[max(fitted)]
    return fitted


def _over(widths: dict[int, int], width: int) -> int:
    """Return by how many characters a line of these columns is too long."""
    return sum(widths.values()) + len(_GAP) * (len(widths) - 1) - width


def _shrink(columns: Sequence[Column], widths: dict[int, int], width: int) -> None:
    """Make columns narrower that may be, the widest first."""
    while (over := _over(widths, width)) > 0:
        able = [number for number in widths if 0 < columns[number].least < widths[number]]
        if not able:
            return
        widest = max(able, key=widths.__getitem__)
        widths[widest] = max(columns[widest].least, widths[widest] - over)


def _line(cells: Sequence[str], widths: dict[int, int], view: View) -> str:
    last = max(widths, default=0)
    shown = []
    for number, width in widths.items():
        text = _cut(cells[number], width)
        padding = "" if number == last else " " * (width - len(text))
        shown.append(view.painted(cells[number], text) + padding)
    return _GAP.join(shown).rstrip()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _printable(cell: str) -> str:
    """Return a cell without what a terminal would obey: clouds and guests have a say in errors."""
    return cell if cell.isprintable() else "".join(each if each.isprintable() else " " for each in cell)


def lines(*given: str) -> str:
    """Return the lines that are not empty."""
    return "\n".join(line for line in given if line)


def at(address: str, port: int) -> str:
    """Return an address and a port as one word."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def some(items: Iterable[str], count: int = 0, most: int = 3) -> str:
    """Return the first few of them in a line. :param count: of all, if these are not."""
    its = list(items)
    rest = max(count, len(its)) - most
    return ", ".join(its[:most]) + (f" and {rest} more" if rest > 0 else "")


def age(at: int, now: float) -> str:
    """Return how long ago that was, as kubectl does. :param at: nanoseconds since 1970 UTC; 0: not known."""
    return duration(now - at / _NANOS) if at else "-"


def duration(seconds: float) -> str:
    """Return a time in one unit or two, as kubectl does: 119s, 9m59s, 179m, 7h59m, 47h, 7d23h, 729d, 2y1d.

    Of a clock that is behind: 0s."""
    whole = max(int(seconds), 0)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if whole < 120:
        return f"{whole}s"
    if minutes < 10:
        return _two(minutes, "m", whole % 60, "s")
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return _two(hours, "h", minutes % 60, "m")
    if hours < 48:
        return f"{hours}h"
    if days < 8:
        return _two(days, "d", hours % 24, "h")
    if days < 2 * _YEAR:
        return f"{days}d"
    if days < 8 * _YEAR:
        return _two(days // _YEAR, "y", days % _YEAR, "d")
    return f"{days // _YEAR}y"


def _two(large: int, unit: str, small: int, smaller: str) -> str:
    return f"{large}{unit}{small}{smaller}" if small else f"{large}{unit}"
