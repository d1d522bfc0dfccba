# SPDX-License-Identifier: Apache-2.0
"""A configuration as a list of its keys, each with its value in TOML."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeGuard, cast

import attrs

from infranetes_common.config import Bytes
from infranetes_common.redaction import redacted

_UNITS = ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB"))
_BARE_KEY = re.compile("[A-Za-z0-9_-]+")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')  # as `toml` writes it


class _Factory(Protocol):
    """A default that is made anew for each instance."""

    factory: Callable[[], object]


_FACTORY = cast(type[_Factory], attrs.Factory)  # attrs.Factory is a class, but its stub is a function


@attrs.frozen
class Setting:
    """A key and its value.

    :ivar key: dotted. :ivar text: the value in TOML; "": there is none.
    :ivar secret: whether the value must not be shown. :ivar required: whether there is no default."""

    key: str
    value: object = attrs.field(repr=False)
    text: str = attrs.field(repr=False)
    secret: bool = False
    required: bool = False

    @property
    def shown(self) -> str:
        """The value in TOML, without what looks like a secret in it; "": there is none, or it is secret."""
        return "" if self.secret else _STRING.sub(_redacted, self.text)


def settings(instance: attrs.AttrsInstance, prefix: str = "") -> Iterator[Setting]:
    """Yield every key of an instance of a configuration class; keys of its tables have dotted names."""
    for field in _fields(type(instance)):
        yield from _of(field, getattr(instance, field.name), prefix)


def defaults(cls: type[attrs.AttrsInstance], prefix: str = "") -> Iterator[Setting]:
    """Yield every key of a configuration class with its default."""
    for field in _fields(cls):
        default: object = field.default
        if default is attrs.NOTHING:
            yield Setting(prefix + field.name, None, "", not field.repr, required=True)
        else:
            yield from _of(field, default.factory() if isinstance(default, _FACTORY) else default, prefix)


def _fields(cls: type[attrs.AttrsInstance]) -> Sequence[attrs.Attribute[object]]:
    found: Sequence[attrs.Attribute[object]] = attrs.fields(attrs.resolve_types(cls))
    return found


def _is_table(value: object) -> TypeGuard[attrs.AttrsInstance]:
    return attrs.has(type(value))


def _of(field: attrs.Attribute[object], value: object, prefix: str) -> Iterator[Setting]:
    key = prefix + field.name
    if _is_table(value):
        yield from settings(value, f"{key}.")
    elif isinstance(value, Mapping) and value and all(_is_table(each) for each in value.values()):
        for name, each in value.items():
            yield from settings(each, f"{key}.{name}.")
    else:
        text = size(value) if field.type is Bytes and isinstance(value, int) else toml(value)
        yield Setting(key, value, text, not field.repr)


def toml(value: object) -> str:
    """Return a value in TOML; "" for None, which TOML can't express."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, enum.Enum):
        return toml(value.value)
    if isinstance(value, int | float):
        return repr(value)
    if _is_table(value):
        return _inline({each.key: each.text for each in settings(value)})
    if isinstance(value, Mapping):
        return _inline({str(key): toml(each) for key, each in value.items()})
    if isinstance(value, list | tuple | set | frozenset):
        return f"[{', '.join(map(toml, value))}]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _redacted(string: re.Match[str]) -> str:
    text: str = json.loads(string[0])
    shown = redacted(text)
    return string[0] if shown == text else toml(shown)


def size(value: int) -> str:
    """Return a number of bytes in TOML, with the largest unit of which it is a multiple, if any."""
    for power, unit in _UNITS:
        if value and value % 1024**power == 0:
            return f'"{value // 1024**power}{unit}"'
    return str(value)


def _inline(texts: Mapping[str, str]) -> str:
    pairs = (f"{_key(key)} = {text}" for key, text in texts.items() if text)
    return f"{{ {', '.join(pairs)} }}" if texts else "{}"


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else toml(name)
