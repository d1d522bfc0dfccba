# SPDX-License-Identifier: Apache-2.0
"""JSON from others, whose values may take no more memory than is due.

Parsed, `{}` takes 25 times as many bytes, and a MiB of it 50 ms.
"""

from __future__ import annotations

import json
from typing import Any

MOST_VALUES = 100_000  # that a document may have; parsed, as many take 10 MiB at most
MOST_LEVELS = 200  # of values within values; Python's own limit depends on its version and its stack


def loads(document: bytes | bytearray | str, most: int = MOST_VALUES) -> Any:  # Any: not checked yet
    """Parse a document. :raise ValueError: it is not JSON, too deep, or may have more than `most` values."""
    check(document, most)
    try:
        value = json.loads(document)
    except RecursionError:
        raise _too_deep() from None
    _check_levels(value)
    return value


def check(document: bytes | bytearray | str, most: int = MOST_VALUES) -> None:
    """Count what begins values: commas and brackets, also those within strings.

    :raise ValueError: there are more than `most`."""
    if isinstance(document, str):
        count = sum(map(document.count, ",[{"))
    else:
        count = sum(map(document.count, (b",", b"[", b"{")))
    if count > most:
        raise ValueError(f"JSON with up to {count} values, where {most} are allowed")


def _check_levels(value: object) -> None:
    level: list[dict[str, object] | list[object]] = _outer([value])
    for _ in range(MOST_LEVELS - 1):
        inner: list[object] = []
        for outer in level:
            inner += outer.values() if isinstance(outer, dict) else outer
        if not (level := _outer(inner)):
            return
    if level:
        raise _too_deep()


def _outer(values: list[object]) -> list[dict[str, object] | list[object]]:
    return [value for value in values if isinstance(value, (dict, list))]


def _too_deep() -> ValueError:
    return ValueError(f"JSON of more than {MOST_LEVELS} levels")
