"""Configuration: one TOML file, flags over it, and the attrs class that says what may be in it.

Every error is a `ConfigError` that names the file (or the command line), the key and what is
expected there, several at once where there are several. Nothing is converted in silence: "5" is no
integer and 1 is not true. A value is never quoted where its attribute has ``repr=False``, which is
how a configuration class marks a secret.

A class for configuration is a frozen attrs class with annotated attributes: bool, int, float, str,
`Path`, `Bytes`, `Seconds`, enums, `Literal`, the classes of `ipaddress`, ``X | None``, tuples and
lists, ``dict[str, X]``, and other such classes for tables. An attribute without a default is a key
that must be there.
"""

from __future__ import annotations

import difflib
import enum
import ipaddress
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NewType, TypeVar, Union, get_args, get_origin

import attrs
import cattrs

from infranetes_common.errors import ConfigError

T = TypeVar("T")

MAX_FILE_BYTES = 1024 * 1024

Bytes = NewType("Bytes", int)
"""A size: a number of bytes, or a string with a unit (KiB, MiB, GiB, TiB, or kB, MB, GB, TB)."""

Seconds = NewType("Seconds", float)
"""A time: a number of seconds, or a string with a unit (ms, s, m, h)."""

_SIZES = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for unit, base in (("iB", 1024), ("B", 1000))
    for power, prefix in enumerate("KMGT" if base == 1024 else "kMGT", start=1)
}
_TIMES = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_ADDRESSES = {
    ipaddress.IPv4Address: "an IPv4 address, such as 10.88.0.1",
    ipaddress.IPv6Address: "an IPv6 address, such as fd00::1",
    ipaddress.IPv4Network: "an IPv4 subnet, such as 10.88.0.0/16",
    ipaddress.IPv6Network: "an IPv6 subnet, such as fd00::/64",
    ipaddress.IPv4Interface: "an IPv4 address with its prefix length, such as 10.88.0.1/16",
    ipaddress.IPv6Interface: "an IPv6 address with its prefix length, such as fd00::1/64",
}


_Fault = tuple[tuple[str, ...], str]


class _Wrong(Exception):
    """What is wrong, each with the keys that lead to it; the values are not in it."""

    def __init__(self, *faults: _Fault) -> None:
        super().__init__(faults)
        self.faults = faults

    def within(self, key: str) -> _Wrong:
        return _Wrong(*(((key, *keys), words) for keys, words in self.faults))


def load(path: str | os.PathLike[str] | None, cls: type[T], overrides: Mapping[str, Any] | None = None) -> T:
    """The configuration in the file at `path`.

    :param path: None: no file, defaults and `overrides` alone.
    :param overrides: values of flags by dotted key, which win; None stands for a flag not given.
    :raise ConfigError: the file can't be read or is wrong.
    """
    table = {} if path is None else _read(Path(path))
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    for key, value in given.items():
        _put(table, key, value)
    return structure(table, cls, source="command line" if path is None else str(path), flags=frozenset(given))


def structure(
    table: Mapping[str, Any],
    cls: type[T],
    *,
    source: str,
    prefix: str = "",
    flags: frozenset[str] = frozenset(),
) -> T:
    """`table` as a `cls`.

    :param source: the file it is from, for errors.
    :param prefix: the dotted key of the table itself, for errors.
    :param flags: the dotted keys that flags gave, for errors.
    :raise ConfigError: it is wrong.
    """
    try:
        return _converter.structure(table, cls)
    except _Wrong as wrong:
        raise ConfigError("\n".join(_lines(wrong, source, prefix, flags))) from None


def secret(**options: Any) -> Any:
    """An attribute whose value is shown nowhere: ``attrs.field`` with ``repr=False``."""
    return attrs.field(repr=False, **options)


# -- reading


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: over {MAX_FILE_BYTES} bytes, which no configuration of Infranetes is")
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}: line {line}: not UTF-8 text") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None


def _put(table: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        inner = table.setdefault(parent, {})
        if not isinstance(inner, dict):
            return  # the file has a value where a table belongs, and is told so
        table = inner
    table[last] = value


def _lines(wrong: _Wrong, source: str, prefix: str, flags: frozenset[str]) -> Iterator[str]:
    for keys, words in wrong.faults:
        key = ".".join(keys)
        full = ".".join(part for part in (prefix, key) if part)
        where = "command line" if key in flags else source
        yield f"{where}: {full}: {words}" if full else f"{where}: {words}"


# -- words for people


def _kind(value: Any) -> str:
    for types, words in (
        (bool, "true or false"),
        (int, "an integer"),
        (float, "a number"),
        (str, "a string"),
        (dict, "a table"),
        (list, "a list"),
    ):
        if isinstance(value, types):
            return words
    return f"a {type(value).__name__}"


def _expected(annotation: Any) -> str:
    """What a value of this type looks like."""
    simple = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "a string",
        Path: "a path",
        Bytes: 'a size, such as "512MiB"',
        Seconds: 'a time, such as "30s"',
        **_ADDRESSES,
    }
    if annotation in simple:
        return simple[annotation]
    if _is_optional(annotation):
        return _expected(_without_none(annotation))
    origin = get_origin(annotation) or annotation
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return f"one of {', '.join(str(member.value) for member in origin)}"
    return "a list" if origin in (tuple, list) else "a table"


def _refused(annotation: Any, value: Any) -> _Wrong:
    return _Wrong(((), f"{_expected(annotation)} is expected, not {_kind(value)}"))


def _unknown(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"not known; did you mean {close[0]}?" if close else f"not known; known are {', '.join(known)}"


# -- types


def _is_optional(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType) and NoneType in get_args(annotation)


def _without_none(annotation: Any) -> Any:
    rest = [each for each in get_args(annotation) if each is not NoneType]
    if len(rest) != 1:
        raise TypeError(f"configuration classes may not have {annotation}")
    return rest[0]


def _exactly(simple: type) -> Callable[[Any, Any], Any]:
    """A hook that takes values of just this type."""

    def hook(value: Any, _annotation: Any) -> Any:
        if type(value) is not simple:
            raise _refused(simple, value)
        return value

    return hook


def _float(value: Any, _annotation: Any) -> float:
    if type(value) not in (int, float):
        raise _refused(float, value)
    if not math.isfinite(value):
        raise _Wrong(((), "a finite number is expected"))
    return float(value)


def _path(value: Any, _annotation: Any) -> Path:
    if isinstance(value, Path):  # a flag or a default of the program
        return value
    if not isinstance(value, str):
        raise _refused(Path, value)
    if not value or "\0" in value:
        raise _Wrong(((), "a path is expected, not an empty string" if not value else "not a path"))
    return Path(value)


def _quantity(annotation: Any, units: Mapping[str, float], value: Any) -> float:
    """A number as it is, or a string of a number and a unit."""
    if type(value) in (int, float):
        number: float = value
    elif isinstance(value, str):
        parts = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", value)
        if parts is None or parts[2] not in units:
            raise _Wrong(
                ((), f"{_expected(annotation)} is expected; units are {', '.join(filter(None, units))}")
            )
        number = float(parts[1]) * units[parts[2]]
    else:
        raise _refused(annotation, value)
    if not 0 <= number < 2**63:
        raise _Wrong(((), f"{_expected(annotation)} is expected, not below 0 or beyond all bounds"))
    return number


def _bytes(value: Any, _annotation: Any) -> Bytes:
    if isinstance(value, float):
        raise _refused(Bytes, value)
    return Bytes(int(_quantity(Bytes, _SIZES, value)))


def _seconds(value: Any, _annotation: Any) -> Seconds:
    return Seconds(float(_quantity(Seconds, _TIMES, value)))


def _address(value: Any, annotation: Any) -> Any:
    if not isinstance(value, str):
        raise _refused(annotation, value)
    try:
        return annotation(value)
    except ValueError:
        raise _Wrong(((), f"{_ADDRESSES[annotation]} is expected")) from None


def _choice(value: Any, annotation: Any) -> Any:
    """An enum's member by its value, or one of a Literal's values."""
    members: dict[Any, Any]
    if isinstance(annotation, enum.EnumType):
        members = {member.value: member for member in list[enum.Enum](annotation)}
    else:
        members = {each: each for each in get_args(annotation)}
    for key, member in members.items():
        if type(key) is type(value) and key == value:
            return member
    raise _Wrong(((), f"{_expected(annotation)} is expected"))


def _optional(value: Any, annotation: Any) -> Any:
    return None if value is None else _converter.structure(value, _without_none(annotation))


def _sequence(value: Any, annotation: Any) -> Any:
    """``list[X]`` and ``tuple[X, ...]``."""
    if not isinstance(value, list | tuple):
        raise _refused(annotation, value)
    kind, item = get_origin(annotation), get_args(annotation)[0]
    if kind is tuple and get_args(annotation)[1:] != (...,):
        raise TypeError(f"configuration classes may not have {annotation}")
    return kind(_each(enumerate(value, start=1), lambda _key: item).values())


def _mapping(value: Any, annotation: Any) -> Any:
    """``dict[str, X]`` and ``Mapping[str, X]``."""
    if not isinstance(value, Mapping):
        raise _refused(annotation, value)
    return _each(value.items(), lambda _key: (get_args(annotation) or (str, Any))[1])


def _each(items: Any, annotation: Callable[[Any], Any]) -> dict[Any, Any]:
    """Structure all, and tell of all that are wrong."""
    found: dict[Any, Any] = {}
    faults: list[_Fault] = []
    for key, value in items:
        try:
            found[key] = _converter.structure(value, annotation(key))
        except _Wrong as wrong:
            faults += wrong.within(str(key)).faults
    if faults:
        raise _Wrong(*faults)
    return found


def _table(value: Any, cls: Any) -> Any:
    """An attrs class."""
    if not isinstance(value, Mapping):
        raise _refused(cls, value)
    attrs.resolve_types(cls)
    known = {attribute.alias: attribute for attribute in attrs.fields(cls) if attribute.init}
    faults: list[_Fault] = [((key,), _unknown(key, list(known))) for key in value if key not in known]
    faults += [
        ((key,), f"missing; {_expected(attribute.type)} is expected")
        for key, attribute in known.items()
        if attribute.default is attrs.NOTHING and key not in value
    ]
    arguments: dict[str, Any] = {}
    try:
        arguments = _each(
            ((key, each) for key, each in value.items() if key in known), lambda key: known[key].type
        )
    except _Wrong as wrong:
        faults += wrong.faults
    if faults:
        raise _Wrong(*faults)
    return _validated(cls, arguments)


def _validated(cls: Any, arguments: dict[str, Any]) -> Any:
    """An instance whose validators have all had their say, each fault with its attribute's name."""
    try:
        with attrs.validators.disabled():
            instance = cls(**arguments)
    except (ValueError, TypeError) as error:
        raise _Wrong(((), _said(error))) from None
    faults: list[_Fault] = []
    for attribute in attrs.fields(cls):
        if attribute.validator is None:
            continue
        try:
            attribute.validator(instance, attribute, getattr(instance, attribute.name))
        except (ValueError, TypeError) as error:
            words = _said(error) if attribute.repr else "refused; the value is secret and not shown"
            faults.append(((attribute.alias or attribute.name,), words))
    if faults:
        raise _Wrong(*faults)
    return instance


def _said(error: Exception) -> str:
    # attrs' own validators have the words first, then the attribute and the value
    return str(error.args[0]) if error.args else type(error).__name__


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter(detailed_validation=False)
    for simple in (bool, int, str):
        converter.register_structure_hook(simple, _exactly(simple))
    converter.register_structure_hook(float, _float)
    converter.register_structure_hook(Path, _path)
    converter.register_structure_hook(enum.Enum, _choice)
    for kind in _ADDRESSES:
        converter.register_structure_hook(kind, _address)
    hooks: list[tuple[Callable[[Any], bool], Callable[[Any, Any], Any]]] = [
        (attrs.has, _table),
        (lambda t: get_origin(t) in (tuple, list), _sequence),
        (lambda t: t is dict or get_origin(t) in (dict, Mapping), _mapping),
        (_is_optional, _optional),
        (lambda t: get_origin(t) is Literal, _choice),
        (lambda t: t is Bytes, _bytes),
        (lambda t: t is Seconds, _seconds),
        (lambda t: t is Any, lambda value, _annotation: value),
    ]
    for predicate, hook in hooks:
        converter.register_structure_hook_func(predicate, hook)
    return converter


_converter = _make_converter()
