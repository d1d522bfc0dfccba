# SPDX-License-Identifier: Apache-2.0
"""Reading the answer to a list as it arrives, one object at a time, so that the reactor is not blocked.

`json.loads` of a whole list takes seconds in large clusters, and even in a thread lets no other thread run.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

MAX_OBJECT = 16 << 20  # characters of one object of the list, or of another field of the answer

_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = "0123456789+-.eE"  # the characters of a number


class ListReader:
    """Reads one answer.

    :param take: called with each of its items, in order.
    :ivar rest: the answer's other fields, including `metadata`, as far as they have arrived.
    """

    def __init__(self, take: Callable[[object], None]) -> None:
        self._take = take
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._decode = json.JSONDecoder().raw_decode
        self._text = ""
        self._pieces: list[str] = []  # what has come since, and is not read yet
        self._held = 0  # how many characters are in these and in the text
        self._worth = 0  # how many must be there before a value is tried again
        self._next: Callable[[int], int] | None = self._begin
        self._key = ""
        self.rest: dict[str, object] = {}

    def feed(self, data: bytes) -> None:
        """Read the next piece of the answer. :raise ValueError: it is not a list."""
        piece = self._decoder.decode(data)
        self._pieces.append(piece)
        self._held += len(piece)
        if self._held < self._worth and self._held <= MAX_OBJECT:
            return
        self._text = "".join((self._text, *self._pieces))
        self._pieces = []
        at = 0
        while self._next is not None:
            at = self._skip(at)
            if at == len(self._text):
                break
            try:
                at = self._next(at)
            except _Incomplete:
                break
        self._text = self._text[at:] if self._next is not None else ""
        self._held = len(self._text)
        if self._held > MAX_OBJECT:
            raise ValueError(f"one object has over {MAX_OBJECT} characters")

    def end(self) -> Mapping[str, Any]:  # Any: JSON
        """Return `rest` at the end of the answer. :raise ValueError: the answer is incomplete."""
        self._worth = 0
        self.feed(b"")
        if self._next is not None or self._decoder.getstate()[0]:
            raise ValueError("a list has broken off")
        return self.rest

    # Each of these reads one token at a place, and returns the place after it

    def _begin(self, at: int) -> int:
        return self._mark(at, "{", self._first_key)

    def _first_key(self, at: int) -> int:
        if self._text[at] == "}":
            return self._finish(at)
        return self._read_key(at)

    def _read_key(self, at: int) -> int:
        key, at = self._value(at)
        if not isinstance(key, str):
            raise ValueError("a list has a key that is no text")
        self._key, self._next = key, self._colon
        return at

    def _colon(self, at: int) -> int:
        return self._mark(at, ":", self._field)

    def _field(self, at: int) -> int:
        if self._key == "items" and self._text[at] == "[":
            self._next = self._first_item
            return at + 1
        self.rest[self._key], at = self._value(at)
        self._next = self._after_field
        return at

    def _after_field(self, at: int) -> int:
        if self._text[at] == "}":
            return self._finish(at)
        return self._mark(at, ",", self._read_key)

    def _first_item(self, at: int) -> int:
        if self._text[at] == "]":
            self._next = self._after_field
            return at + 1
        return self._item(at)

    def _item(self, at: int) -> int:
        item, at = self._value(at)
        self._take(item)
        self._next = self._after_item
        return at

    def _after_item(self, at: int) -> int:
        if self._text[at] == "]":
            self._next = self._after_field
            return at + 1
        return self._mark(at, ",", self._item)

    def _finish(self, at: int) -> int:
        self._next = None
        return at + 1

    def _mark(self, at: int, mark: str, then: Callable[[int], int]) -> int:
        if self._text[at] != mark:
            raise ValueError(f"a list has {self._text[at]!r} where {mark!r} should be")
        self._next = then
        return at + 1

    def _value(self, at: int) -> tuple[Any, int]:  # Any: JSON
        """Return the value at a place and the place after it.

        :raise _Incomplete: it has not arrived entirely."""
        try:
            value, end = self._decode(self._text, at)
        except RecursionError:
            raise ValueError("a list has an object that is too deep") from None
        except ValueError as error:
            # The value may be invalid or just incomplete: more data, or the list's end, will show which.
            left = len(self._text) - at
            self._worth = 2 * left if left > 1 << 16 else 0
            raise _Incomplete from error
        if self._text[end - 1] in _NUMBER and not self._text[end:].strip(_NUMBER):
            raise _Incomplete  # a number ends only before another character: "1.5" may become "1.5e+16"
        self._worth = 0
        return value, end

    def _skip(self, at: int) -> int:
        found = _SPACE.match(self._text, at)
        assert found is not None
        return found.end()


class _Incomplete(Exception):
    """A value has not arrived entirely."""
