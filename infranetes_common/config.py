# SPDX-License-Identifier: Apache-2.0
"""Configuration: a TOML file, its drop-ins and the flags that override them, read into an attrs class.

Every fault is reported, all in one `ConfigError`, with the file (or the command line), the key and the
expected value. Nothing is converted silently: "5" is not an integer, and 1 is not true. Values are never
quoted if their attribute has ``repr=False``, which marks secrets.

A configuration class is a frozen attrs class whose attributes are annotated with bool, int, float, str,
`Path`, `Bytes`, `Seconds`, enums, `Literal`, the classes of `ipaddress`, ``X | None``, tuples and lists,
``dict[str, X]``, or other such classes for tables. An attribute without a default is a required key.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import attrs

from infranetes_common import config_files
from infranetes_common.config_files import Document, Sources
from infranetes_common.config_values import HOLDS, UNKNOWN, Bytes, Invalid, Seconds, converter, places_of
from infranetes_common.errors import ConfigError

__all__ = ["HOLDS", "Bytes", "Seconds", "load", "secret", "structure"]

T = TypeVar("T")


def load(
    path: str | os.PathLike[str] | None, cls: type[T], overrides: Mapping[str, object] | None = None
) -> T:
    """Read the configuration file at `path`, and its drop-ins.

    :param path: None: there is no file, only defaults and `overrides`.
    :param overrides: flags' values by dotted key, which win over the file; None is a flag that was not given.
    :raise ConfigError: the file can't be read or is wrong.
    """
    document = Document({}, Sources("command line")) if path is None else config_files.read(path)
    return of_document(document, cls, overrides)


def of_document(document: Document, cls: type[T], overrides: Mapping[str, object] | None = None) -> T:
    """Make a `cls` from a document that was read already, as `load` does.

    :raise ConfigError: a key or value is wrong."""
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    table = copy.deepcopy(document.table)
    for key, value in given.items():
        _put(table, key, value)
    try:
        return structure(table, cls, source=document.sources.main, flags=frozenset(given))
    except ConfigError as error:
        raise document.sources.placed(error) from None


def structure(
    table: Mapping[str, object],
    cls: type[T],
    *,
    source: str,
    prefix: str = "",
    flags: frozenset[str] = frozenset(),
    whole: type[attrs.AttrsInstance] | None = None,
) -> T:
    """Make a `cls` of a table.

    :param source: the file that the table is from, for errors.
    :param prefix: the dotted key of the table itself, for errors.
    :param whole: the class of the whole file, for errors that say in which table a key belongs; None: `cls`.
    :param flags: the dotted keys that are from flags, for errors.
    :raise ConfigError: the table is wrong.
    """
    try:
        return converter.structure(table, cls)
    except Invalid as invalid:
        root = whole or (cls if attrs.has(cls) else None)
        raise ConfigError("\n".join(_lines(invalid, source, prefix, flags, root))) from None


def secret(**options: Any) -> Any:  # Any: like attrs.field, which returns the type of the attribute
    """Return an attribute whose value is never shown: ``attrs.field`` with ``repr=False``."""
    return attrs.field(repr=False, **options)


def _put(table: dict[str, object], key: str, value: object) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        inner = table.setdefault(parent, {})
        if not isinstance(inner, dict):
            return  # an error in any case: the file has a value where a table belongs
        table = inner
    table[last] = value


def _lines(
    invalid: Invalid,
    source: str,
    prefix: str,
    flags: frozenset[str],
    whole: type[attrs.AttrsInstance] | None,
) -> Iterator[str]:
    for keys, words in invalid.faults:
        if words.startswith(UNKNOWN) and whole is not None and (meant := _meant(keys[-1], whole)):
            words = f"not known; did you mean {meant}?"
        key = ".".join(keys)
        full = ".".join(part for part in (prefix, key) if part)
        where = "command line" if key in flags else source
        yield f"{where}: {full}: {words}" if full else f"{where}: {words}"


def _meant(key: str, whole: type[attrs.AttrsInstance]) -> str:
    """Return where a key belongs that stands in the wrong table; "": nowhere."""
    places = list(places_of(key, whole))[:3]
    return " or ".join(each if "." in each else f"{each}, above the first table" for each in places)
