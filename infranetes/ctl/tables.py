# SPDX-License-Identifier: Apache-2.0
"""Text tables for infranetes-ctl."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

Json = dict[str, object]
_NANOS = 1e9


def table(head: Sequence[str], rows: Iterable[Sequence[str]], may_lack: Collection[str] = ()) -> str:
    """Return a table whose columns are as wide as their widest cell.

    :param may_lack: names of columns that are left out if all their cells are empty."""
    given = list(rows)
    kept = [
        column
        for column, name in enumerate(head)
        if name not in may_lack or any(row[column] for row in given)
    ]
    head = [head[column] for column in kept]
    lines = [[row[column] or "-" for column in kept] for row in given]
    widths = [max(len(row[column]) for row in (head, *lines)) for column in range(len(head))]
    shown = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in (head, *lines)
    ]
    return "\n".join(line.rstrip() for line in shown)


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


def age(created_at: int, now: float) -> str:
    """Return how long ago that was, in one unit or two."""
    if not created_at:
        return "-"
    seconds = max(int(now - created_at / _NANOS), 0)
    for unit, size, smaller, smaller_size in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "m", 60),
        ("m", 60, "s", 1),
    ):
        if seconds >= size:
            rest = seconds % size // smaller_size
            return f"{seconds // size}{unit}" + (f"{rest}{smaller}" if rest and seconds // size < 10 else "")
    return f"{seconds}s"
