"""Configuration: TOML text into attrs classes, every error naming the file and the key."""

from __future__ import annotations

import enum
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import cattrs

from infranetes_common.errors import ConfigError

_T = TypeVar("_T")
_MAX_BYTES = 1024 * 1024


class _Problem(Exception):
    """Something is wrong with the value at `path`."""

    def __init__(self, path: tuple[str, ...], words: str) -> None:
        super().__init__(path, words)
        self.path = path
        self.words = words


def load(path: str | Path, cls: type[_T]) -> _T:
    """The configuration in the TOML file `path`, as an instance of the attrs class `cls`.

    :raise ConfigError: unreadable, not TOML, an unknown or missing key, a wrong value; names file and key.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from None
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"{path}: over {_MAX_BYTES} bytes; is that a configuration file?")
    try:
        table = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    return structure(table, cls, str(path))


def structure(table: Mapping[str, Any], cls: type[_T], origin: str) -> _T:
    """`table`, as TOML was read, as an instance of the attrs class `cls`.

    Fields are bool, int, float, str, Path, enums, attrs classes, and lists, tuples, mappings and
    optionals of those. Values are not converted: "1" is no number and 1 no text.

    :param origin: what the error names before the key: a file, or a table's name.
    :raise ConfigError: an unknown or missing key, or a wrong value.
    """
    try:
        structured: _T = _converter.structure(table, cls)
    except _Problem as problem:
        raise ConfigError(": ".join(filter(None, (origin, ".".join(problem.path), problem.words)))) from None
    return structured


def _at(name: str, value: Any, kind: Any) -> Any:
    """`value` as `kind`; what is wrong with it is wrong at `name`."""
    try:
        return _converter.structure(value, kind)
    except _Problem as problem:
        raise _Problem((name, *problem.path), problem.words) from None
    except Exception:  # whatever cattrs raises for a union or a literal
        raise _Problem((name,), f"expected {_words(kind)}, not {_shown(value)}") from None


def _structure_class(value: Any, cls: Any) -> Any:
    if not isinstance(value, Mapping):
        raise _Problem((), f"expected a table, not {_shown(value)}")
    fields = {field.name: field for field in attrs.fields(cls) if field.init}
    for key in value:
        if key not in fields:
            raise _Problem((str(key),), f"unknown key; known are {', '.join(fields)}")
    kinds = typing.get_type_hints(cls)
    given = {key: _at(key, each, kinds[key]) for key, each in value.items()}
    for name, field in fields.items():
        if name not in given and field.default is attrs.NOTHING:
            raise _Problem((name,), f"has to be given: {_words(kinds[name])}")
    for name, each in given.items():
        validator = fields[name].validator
        if validator is not None:
            try:
                validator(None, fields[name], each)
            except (ValueError, TypeError) as error:
                raise _Problem((name,), _plain(error)) from None
    try:
        return cls(**given)
    except (ValueError, TypeError) as error:
        raise _Problem((), _plain(error)) from None


def _structure_sequence(value: Any, kind: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise _Problem((), f"expected {_words(kind)}, not {_shown(value)}")
    element = (*typing.get_args(kind), Any)[0]
    made = [_at(str(number), each, element) for number, each in enumerate(value)]
    origin = typing.get_origin(kind)
    return made if origin is list else frozenset(made) if origin is frozenset else tuple(made)


def _structure_mapping(value: Any, kind: Any) -> Any:
    if not isinstance(value, Mapping):
        raise _Problem((), f"expected a table, not {_shown(value)}")
    element = (*typing.get_args(kind), Any, Any)[1]
    return {key: _at(str(key), each, element) for key, each in value.items()}


def _exactly(*kinds: type) -> Callable[[Any, Any], Any]:
    def hook(value: Any, kind: Any) -> Any:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise _Problem((), f"expected {_words(kind)}, not {_shown(value)}")
        return kind(value)

    return hook


def _structure_enum(value: Any, kind: Any) -> Any:
    for member in kind:
        if member.value == value and type(member.value) is type(value):
            return member
    raise _Problem((), f"expected {_words(kind)}, not {_shown(value)}")


def _has_origin(*origins: Any) -> Callable[[Any], bool]:
    return lambda kind: typing.get_origin(kind) in origins


_converter = cattrs.Converter(detailed_validation=False)
for _kind, _accepted in (
    (bool, (bool,)),
    (int, (int,)),
    (float, (int, float)),
    (str, (str,)),
    (Path, (str, Path)),
):
    _converter.register_structure_hook(_kind, _exactly(*_accepted))
_converter.register_structure_hook_func(
    lambda kind: isinstance(kind, type) and issubclass(kind, enum.Enum), _structure_enum
)
_converter.register_structure_hook_func(_has_origin(list, tuple, frozenset, Sequence), _structure_sequence)
_converter.register_structure_hook_func(_has_origin(dict, Mapping), _structure_mapping)
_converter.register_structure_hook_func(lambda kind: attrs.has(kind), _structure_class)


_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    type(None): "nothing",
}


def _words(kind: Any) -> str:
    """A type, for people."""
    if kind in _WORDS:
        return _WORDS[kind]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "one of " + ", ".join(repr(member.value) for member in kind)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (list, tuple, frozenset, Sequence):
        return "a list"
    if origin in (dict, Mapping) or attrs.has(kind):
        return "a table"
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(each) for each in inner)
    if inner:
        return " or ".join(_words(each) for each in inner if each is not type(None))
    return str(getattr(kind, "__name__", kind))


def _shown(value: Any) -> str:
    """A wrong value, for people: not all of a long one, for it may be a secret in the wrong place."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."


def _plain(error: Exception) -> str:
    """The first argument of a validator's error, which attrs follows by its objects."""
    return str(error.args[0]) if error.args else type(error).__name__
