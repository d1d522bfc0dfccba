# SPDX-License-Identifier: Apache-2.0
"""Reading Kubernetes' objects from JSON that may be anything.

Fields that are not asked for are ignored, so that the objects of newer API servers can be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import attrs

from infranetes_common.addresses import Address, Network, parse_address, parse_network
from infranetes_common.errors import InvalidArgument

T = TypeVar("T")

PROTOCOLS = ("TCP", "UDP", "SCTP")
MAX_NAME = 253  # characters


@attrs.frozen
class Name:
    """An object's namespace and name."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def name(item: object) -> Name:
    """Return an object's namespace and name; both empty if it has no valid ones."""
    try:
        return Fields(item, "an object").name()
    except InvalidArgument:
        return Name("", "")


class Fields:
    """A JSON object whose fields are read with their types.

    Reading a field of another type raises InvalidArgument.

    :ivar what: names the object in errors."""

    def __init__(self, value: object, what: str) -> None:
        if not isinstance(value, Mapping):
            raise InvalidArgument(f"{what} is no object but {type(value).__name__}")
        self._value: Mapping[str, object] = value
        self.what = what

    def name(self) -> Name:
        """Return its namespace and name, and name these in errors from now on."""
        about = self.fields("metadata")
        found = Name(about.text("namespace"), about.text("name"))
        if not found.name:
            raise InvalidArgument(f"{self.what} has no name")
        for each in (found.namespace, found.name):
            # What is printable has no lone surrogate, which no message to a VM could have.
            if len(each) > MAX_NAME or not each.isprintable():
                raise InvalidArgument(f"{self.what}: {each[:100]!r} can't be a name")
        self.what = f"{self.what} {found}"
        return found

    def labels(self) -> Mapping[str, str]:
        return dict(self.fields("metadata").mapping("labels"))

    def mapping(self, key: str) -> Iterator[tuple[str, str]]:
        """Return the keys and texts of the object at `key`."""
        found = self.fields(key)
        return ((each, found.text(each)) for each in found._value)

    def value(self, key: str) -> object:
        """Return the field's value, of any type; None: there is none."""
        return self._value.get(key)

    def has(self, key: str) -> bool:
        return self._value.get(key) is not None

    def fields(self, key: str) -> Fields:
        value = self._value.get(key)
        return Fields({} if value is None else value, f"{self.what}: {key}")

    def items(self, key: str) -> Sequence[Fields]:
        return [Fields(each, f"{self.what}: {key}") for each in self._list(key)]

    def texts(self, key: str) -> Sequence[str]:
        return [self._checked(key, each, str) for each in self._list(key)]

    def text(self, key: str) -> str:
        value = self._value.get(key)
        return "" if value is None else self._checked(key, value, str)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value.get(key)
        return default if value is None else self._checked(key, value, bool)

    def number(self, key: str) -> int | None:
        value = self._value.get(key)
        if isinstance(value, bool):
            raise self._wrong(key, value)
        return None if value is None else self._checked(key, value, int)

    def port(self, key: str = "port") -> int:
        number = self.number(key)
        if number is None or not 0 < number < 65536:
            raise self._wrong(key, number)
        return number

    def protocol(self) -> str:
        found = self.text("protocol") or "TCP"
        if found not in PROTOCOLS:
            raise self._wrong("protocol", found)
        return found

    def address(self, text: str) -> Address:
        try:
            return parse_address(text)
        except ValueError:
            raise self._wrong("an address", text) from None

    def network(self, text: str) -> Network:
        try:
            return parse_network(text, strict=False)
        except ValueError:
            raise self._wrong("a range of addresses", text) from None

    def _list(self, key: str) -> Sequence[object]:
        value = self._value.get(key)
        return () if value is None else self._checked(key, value, list)

    def _checked(self, key: str, value: object, kind: type[T]) -> T:
        if not isinstance(value, kind):
            raise self._wrong(key, value)
        return value

    def _wrong(self, key: str, value: object) -> InvalidArgument:
        return InvalidArgument(f"{self.what}: {key} can't be {str(value)[:100]!r}")
