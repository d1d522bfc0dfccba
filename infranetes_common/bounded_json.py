# SPDX-License-Identifier: Apache-2.0
"""JSON from others, whose values may take no more memory than is due.

Parsed, `{}` takes 25 times as many bytes, and a MiB of it 50 ms.
"""

from __future__ import annotations

import json
from typing import Any

MOST_VALUES = 100_000  # that a document may have; parsed, as many take 10 MiB at most


def loads(document: bytes | bytearray | str, most: int = MOST_VALUES) -> Any:  # Any: not checked yet
    """Parse a document. :raise ValueError: it is not JSON, too deep, or may have more than `most` values."""
    check(document, most)
    try:
        return json.loads(document)
    except RecursionError:
        raise ValueError("JSON that is too deep") from None


def check(document: bytes | bytearray | str, most: int = MOST_VALUES) -> None:
    """Count what begins values: commas and brackets, also those within strings.

    :raise ValueError: there are more than `most`."""
    if isinstance(document, str):
        count = sum(map(document.count, ",[{"))
    else:
        count = sum(map(document.count, (b",", b"[", b"{")))
    if count > most:
        raise ValueError(f"JSON with up to {count} values, where {most} are allowed")
