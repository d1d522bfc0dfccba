# SPDX-License-Identifier: Apache-2.0
"""What an annotation is: one row of a table, and how its value is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from infranetes_common.errors import InvalidArgument

PREFIX = "infranetes.io/"
MAX_VALUE = 4096


@attrs.frozen
class Annotation:
    """An annotation: one row of a table."""

    name: str  # without the prefix
    field: str  # the field of the table's value that it sets; "": only checked here, and used elsewhere
    parse: Callable[[str], object]
    expected: str  # for people
    aliases: tuple[str, ...] = ()
    most: int = MAX_VALUE  # characters of a value
    exact: bool = False  # spaces around the value are part of it
    quoted: bool = True  # whether an error may quote a value, which is no secret

    def value(self, name: str, text: str) -> object:
        """Return what a text means. :param name: how the pod spelt this annotation.

        :raise InvalidArgument: the text is malformed; the message names the annotation."""
        if len(text) > self.most:
            raise InvalidArgument(
                f"annotation {name} has {len(text)} characters, over {self.most}: expected {self.expected}"
            )
        try:
            return self.parse(text if self.exact else text.strip())
        except (ValueError, KeyError):
            said = f" {text[:80]!r}:" if self.quoted else ""
            raise InvalidArgument(f"annotation {name}:{said} expected {self.expected}") from None


def fields(table: Iterable[Annotation], annotations: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of the annotations in the table, by their fields. Any: each has its own type.

    :raise InvalidArgument: a value is malformed, or a name and its alias have different values."""
    found: dict[str, Any] = {}
    for row in table:
        given = [name for name in (PREFIX + row.name, *row.aliases) if name in annotations]
        if not given:
            continue
        values = {annotations[name] for name in given}
        if len(values) > 1:
            raise InvalidArgument(f"annotations {' and '.join(given)} differ; they mean the same: give one")
        value = row.value(given[0], values.pop())
        if row.field:
            found[row.field] = value
    return found


def boolean(text: str) -> bool:
    """Parse true or false."""
    return {"true": True, "false": False}[text.lower()]


def matching(pattern: str) -> Callable[[str], str]:
    """Return what takes values that match a pattern as a whole."""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(text)
        return text

    return parse
