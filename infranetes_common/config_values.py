# SPDX-License-Identifier: Apache-2.0
"""The values that a configuration may have, and the error messages for wrong ones.

See `infranetes_common.config`.
"""

from __future__ import annotations

import difflib
import enum
import ipaddress
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NewType, TypeAlias, TypeVar, Union, get_args, get_origin

import attrs
import cattrs

Bytes = NewType("Bytes", int)
"""A size: a number of bytes, or a string with a unit (KiB, MiB, GiB, TiB, or kB, MB, GB, TB)."""

Seconds = NewType("Seconds", float)
"""A time: a number of seconds, or a string with a unit (ms, s, m, h)."""

UNKNOWN = "not known; known are"  # how the fault of a key that is in no table begins
MISSING = "missing"  # how the fault of a required key that is not there begins

K = TypeVar("K")

Annotation: TypeAlias = object
"""An attribute's annotation, such as ``int | None``: not every one is a type."""

Hook: TypeAlias = Callable[[Any, Any], object]  # Any: each hook narrows its arguments
"""Makes a value of a TOML value and an annotation."""

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


Fault: TypeAlias = tuple[tuple[str, ...], str]


class Invalid(Exception):
    """A value that a configuration may not have.

    :ivar faults: the faults, each with the keys that lead to it; never the value itself.
    """

    def __init__(self, *faults: Fault) -> None:
        super().__init__(faults)
        self.faults = faults

    def within(self, key: str) -> Invalid:
        return Invalid(*(((key, *keys), words) for keys, words in self.faults))


# -- descriptions


def _kind(value: object) -> str:
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


def _expected(annotation: Annotation) -> str:
    """Describe a value of this type."""
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


def _refused(annotation: Annotation, value: object) -> Invalid:
    return Invalid(
        ((), f"{_expected(annotation)} is expected, not {_kind(value)}{_remedy(annotation, value)}")
    )


def _remedy(annotation: Annotation, value: object) -> str:
    """Return what to do about a value of a wrong type, if that is not plain; it follows the fault's words."""
    if annotation is float and isinstance(value, str):
        return ": without quotes, and without a unit"
    if _is_table(annotation) and isinstance(value, list) and value and isinstance(value[0], dict):
        return ": its name stands in [ ], not in [[ ]]"
    items = get_args(annotation)[:1] if get_origin(annotation) in (tuple, list) else ()
    if isinstance(value, dict) and any(map(_is_table, items)):
        return ": its name stands in [[ ]], not in [ ]"
    return ""


def _is_table(annotation: Annotation) -> bool:
    return (isinstance(annotation, type) and attrs.has(annotation)) or get_origin(annotation) in (
        dict,
        Mapping,
    )


HOLDS = "holds"
"""Metadata of a field that is a table of tables: a function that returns the names that these may have, each
with the class of its table, or None where that is not known."""
_MOST_PLACES = 3  # at which a key may have been meant, that are told
# The messages of attrs' validators `in_`, `matches_re`, and `lt`, `le`, `ge` and `gt`.
_CHOICE = re.compile(r"'\w+' must be in [(\[](.*?),?[)\]] \(got (.*)\)", re.DOTALL)
_RANGE = re.compile(r"'\w+' must be in range\((-?\d+), (-?\d+)\) \(got (.*)\)", re.DOTALL)
_FORM = re.compile(r"'\w+' must match regex '(.*)' \((.*) doesn't\)", re.DOTALL)
_BOUND = re.compile(r"'\w+' must be ([<>]=? [^:]+): (.*)", re.DOTALL)


def _misplaced(key: str, cls: type[attrs.AttrsInstance], known: list[str]) -> str:
    """Return what is wrong with a key that a table does not have: it may be one of an inner table."""
    for attribute in attrs.fields(cls):
        if HOLDS in attribute.metadata and key in attribute.metadata[HOLDS]():
            return f"not known; did you mean {attribute.alias}.{key}?"
    within = [name for name in places_of(key, cls) if "." in name]
    if within:
        return f"not known; did you mean {' or '.join(within[:_MOST_PLACES])}?"
    close = _likeliest(key, known)
    return f"not known; did you mean {close}?" if close else f"{UNKNOWN} {', '.join(known)}"


def places_of(key: str, cls: type[attrs.AttrsInstance], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a table, and of those in it, whose last name is this one."""
    tables: dict[str, type[attrs.AttrsInstance] | None] = {}
    held: dict[str, type[attrs.AttrsInstance] | None] = {}
    for each in attrs.fields(attrs.resolve_types(cls)):
        if each.alias == key:
            yield f"{prefix}{key}"
        if HOLDS in each.metadata:
            held |= {f"{each.alias}.{name}": its for name, its in each.metadata[HOLDS]().items()}
        elif isinstance(each.type, type) and attrs.has(each.type):
            tables[each.alias] = each.type
        elif get_origin(each.type) in (dict, Mapping) and attrs.has(its := get_args(each.type)[1]):
            tables[f"{each.alias}.NAME"] = its
    for name, its in (*tables.items(), *held.items()):
        if its is not None:
            yield from places_of(key, its, f"{prefix}{name}.")


def _likeliest(key: str, known: Iterable[str]) -> str:
    """Return the known key that is most like this one; "": none is."""
    close = difflib.get_close_matches(key.lower(), known, n=1)
    return close[0] if close else ""


# -- hooks, each of which reads one kind of value


def _is_optional(annotation: Annotation) -> bool:
    return get_origin(annotation) in (Union, UnionType) and NoneType in get_args(annotation)


def _without_none(annotation: Annotation) -> Annotation:
    rest = [each for each in get_args(annotation) if each is not NoneType]
    if len(rest) != 1:
        raise TypeError(f"configuration classes may not have {annotation}")
    return rest[0]


def _exactly(simple: type) -> Hook:
    """Make a hook that accepts values of exactly this type."""

    def hook(value: object, _annotation: Annotation) -> object:
        if type(value) is not simple:
            raise _refused(simple, value)
        return value

    return hook


def _float(value: object, _annotation: Annotation) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refused(float, value)
    if not math.isfinite(value):
        raise Invalid(((), "a finite number is expected"))
    return float(value)


def _path(value: object, _annotation: Annotation) -> Path:
    if isinstance(value, Path):  # from a flag, or a default of the program
        return value
    if not isinstance(value, str):
        raise _refused(Path, value)
    if not value or "\0" in value:
        raise Invalid(((), "a path is expected, not an empty string" if not value else "not a path"))
    return Path(value)


def _quantity(annotation: Annotation, units: Mapping[str, float], value: object) -> float:
    """Read a number, or a string with a number and a unit."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        number: float = value
    elif isinstance(value, str):
        parts = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", value)
        if parts is None or parts[2] not in units:
            raise Invalid(
                ((), f"{_expected(annotation)} is expected; units are {', '.join(filter(None, units))}")
            )
        number = float(parts[1]) * units[parts[2]]
    else:
        raise _refused(annotation, value)
    if not 0 <= number < 2**63:
        raise Invalid(((), f"{_expected(annotation)} is expected, not below 0 or out of range"))
    return number


def _bytes(value: object, _annotation: Annotation) -> Bytes:
    if isinstance(value, float):
        raise _refused(Bytes, value)
    return Bytes(int(_quantity(Bytes, _SIZES, value)))


def _seconds(value: object, _annotation: Annotation) -> Seconds:
    return Seconds(float(_quantity(Seconds, _TIMES, value)))


def _address(value: object, annotation: type) -> object:
    if not isinstance(value, str):
        raise _refused(annotation, value)
    try:
        return annotation(value)
    except ValueError:
        raise Invalid(((), f"{_ADDRESSES[annotation]} is expected")) from None


def _choice(value: object, annotation: Annotation) -> object:
    """Read an enum's member by its value, or one of a Literal's values."""
    members: dict[object, object]
    if isinstance(annotation, enum.EnumType):
        members = {member.value: member for member in list[enum.Enum](annotation)}
    else:
        members = {each: each for each in get_args(annotation)}
    for key, member in members.items():
        if type(key) is type(value) and key == value:
            return member
    raise Invalid(((), f"{_expected(annotation)} is expected"))


def _optional(value: object, annotation: Annotation) -> object:
    return None if value is None else _read(value, _without_none(annotation))


def _sequence(value: object, annotation: Annotation) -> object:
    """Read a ``list[X]`` or ``tuple[X, ...]``."""
    if not isinstance(value, list | tuple):
        raise _refused(annotation, value)
    kind: type = tuple if get_origin(annotation) is tuple else list
    item = get_args(annotation)[0]
    if kind is tuple and get_args(annotation)[1:] != (...,):
        raise TypeError(f"configuration classes may not have {annotation}")
    return kind(_each(enumerate(value, start=1), lambda _key: item).values())


def _mapping(value: object, annotation: Annotation) -> object:
    """Read a ``dict[str, X]`` or ``Mapping[str, X]``."""
    if not isinstance(value, Mapping):
        raise _refused(annotation, value)
    return _each(value.items(), lambda _key: (get_args(annotation) or (str, Any))[1])


def _each(items: Iterable[tuple[K, object]], annotation: Callable[[K], Annotation]) -> dict[K, object]:
    """Read all values. :raise Invalid: some are wrong; has the faults of all."""
    found: dict[K, object] = {}
    faults: list[Fault] = []
    for key, value in items:
        try:
            found[key] = _read(value, annotation(key))
        except Invalid as wrong:
            faults += wrong.within(str(key)).faults
    if faults:
        raise Invalid(*faults)
    return found


def _table(value: object, cls: type[attrs.AttrsInstance]) -> attrs.AttrsInstance:
    """Read an attrs class."""
    if not isinstance(value, Mapping):
        raise _refused(cls, value)
    attrs.resolve_types(cls)
    known = {attribute.alias: attribute for attribute in attrs.fields(cls) if attribute.init}
    unknown = [key for key in value if key not in known]
    meant = {_likeliest(key, known) for key in unknown}  # a key under a wrong name is not missing
    faults: list[Fault] = [((key,), _misplaced(key, cls, list(known))) for key in unknown]
    faults += [
        ((key,), f"{MISSING}; {_expected(attribute.type)} is expected")
        for key, attribute in known.items()
        if attribute.default is attrs.NOTHING and key not in value and key not in meant
    ]
    arguments: dict[str, object] = {}
    try:
        arguments = _each(
            ((key, each) for key, each in value.items() if key in known), lambda key: known[key].type
        )
    except Invalid as wrong:
        faults += [(keys, words + _table_meant(keys, value, known)) for keys, words in wrong.faults]
    if faults:
        raise Invalid(*faults)
    return _validated(cls, arguments)


def _table_meant(
    keys: Sequence[str], value: Mapping[str, object], known: Mapping[str, attrs.Attribute[object]]
) -> str:
    """Return which table was meant by a name that is none's; "": no name was used so."""
    key, *inner = keys
    if inner or not isinstance(value[key], dict) or _is_table(known[key].type):
        return ""
    close = _likeliest(key, [name for name, its in known.items() if _is_table(its.type)])
    return f"; did you mean the table {close}?" if close else ""


def _validated(cls: type[attrs.AttrsInstance], arguments: dict[str, object]) -> attrs.AttrsInstance:
    """Make an instance and run all validators; each fault has its attribute's name."""
    try:
        with attrs.validators.disabled():
            instance = cls(**arguments)
    except (ValueError, TypeError) as error:
        raise Invalid(((), _said(error))) from None
    faults: list[Fault] = []
    for attribute in attrs.fields(cls):
        if attribute.validator is None:
            continue
        try:
            attribute.validator(instance, attribute, getattr(instance, attribute.name))
        except (ValueError, TypeError) as error:
            words = (
                _said(error, attribute.name)
                if attribute.repr
                else "refused; the value is secret and not shown"
            )
            faults.append(((attribute.alias or attribute.name,), words))
    if faults:
        raise Invalid(*faults)
    return instance


def _read(value: object, annotation: Annotation) -> Any:  # Any: cattrs accepts more than its types say
    wanted: Any = annotation  # Any: as above
    return converter.structure(value, wanted)


def _said(error: Exception, name: str = "") -> str:
    """Return the words of an error, without the attribute's name, which the key says already."""
    # attrs' own validators raise with the message first, then the attribute and the value
    words = str(error.args[0]) if error.args else type(error).__name__
    if match := _CHOICE.fullmatch(words):
        choices = ", ".join(each.strip("'") for each in match[1].split(", "))
        return f"{match[2]} is none of {choices}"
    if match := _RANGE.fullmatch(words):
        return f"{match[3]} is not {match[1]} to {int(match[2]) - 1}"
    if match := _FORM.fullmatch(words):
        return f"{match[2]} is not of the form {match[1]}"
    if match := _BOUND.fullmatch(words):
        return f"{match[2]} is not {match[1]}"
    return words.removeprefix(f"{name}: ")


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter(detailed_validation=False)
    for simple in (bool, int, str):
        converter.register_structure_hook(simple, _exactly(simple))
    converter.register_structure_hook(float, _float)
    converter.register_structure_hook(Path, _path)
    converter.register_structure_hook(enum.Enum, _choice)
    for kind in _ADDRESSES:
        converter.register_structure_hook(kind, _address)
    hooks: list[tuple[Callable[[Any], bool], Hook]] = [  # Any: annotations
        (attrs.has, _table),
        (lambda t: get_origin(t) in (tuple, list), _sequence),
        (lambda t: t is dict or get_origin(t) in (dict, Mapping), _mapping),
        (_is_optional, _optional),
        (lambda t: get_origin(t) is Literal, _choice),
        (lambda t: t is Bytes, _bytes),
        (lambda t: t is Seconds, _seconds),
        (lambda t: t in (Any, object), lambda value, _annotation: value),
    ]
    for predicate, hook in hooks:
        converter.register_structure_hook_func(predicate, hook)
    return converter


converter = _make_converter()
