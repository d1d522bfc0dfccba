# SPDX-License-Identifier: Apache-2.0
"""A configuration's files without their secrets, by the same rules as `config show`.

A value is hidden if its attribute has ``repr=False``, and in the table of a plug-in that does not tell its
attributes every value is. Besides, values are hidden whose keys sound as if they were secrets.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator, Mapping
from typing import TypeGuard, get_args, get_origin

import attrs

from infranetes.config import Config
from infranetes.ctl.secrets.keys import is_secret, leaves, may_be_secret
from infranetes.providers.registry import settings_class
from infranetes_common.redaction import HIDDEN

_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[^\s/]{12,}")  # unlike a region's or a machine's name

_Class = type[attrs.AttrsInstance]


@attrs.frozen
class Shown:
    """A configuration's table without its secrets.

    :ivar secrets: the hidden values that may be searched for in other texts: not `true`, or a region."""

    table: Mapping[str, object]
    secrets: list[str]


def without_secrets(table: Mapping[str, object]) -> Shown:
    """Return the table of a configuration's file, valid or not. Blocks: it may import a plug-in."""
    secrets: list[str] = []
    return Shown(_of_class(table, Config, secrets), secrets)


def _of_class(table: Mapping[str, object], cls: _Class, secrets: list[str]) -> dict[str, object]:
    fields: dict[str, attrs.Attribute[object]] = {
        each.name: each for each in attrs.fields(attrs.resolve_types(cls))
    }
    shown: dict[str, object] = {}
    for key, value in table.items():
        field = fields.get(key)
        if cls is Config and key == "providers" and isinstance(value, dict):
            shown[key] = {name: _of_provider(name, each, secrets) for name, each in value.items()}
        elif field is None:  # an error; nobody knows what it was to be
            shown[key] = _unknown(key, value, secrets)
        elif not field.repr or may_be_secret(key):
            secrets += (text for _, text in leaves({key: value}))
            shown[key] = HIDDEN if value else value
        else:
            shown[key] = _of_type(value, field.type, secrets)
    return shown


def _of_type(value: object, type: object, secrets: list[str]) -> object:
    """Return the value of an attribute of such a type, which may have tables in it."""
    cls = next(_classes(type), None)
    if cls is None:
        secrets += (text for keys, text in leaves(value) if is_secret(keys))
        return _by_name(value)
    if isinstance(value, list):
        return [_of_type(each, cls, secrets) for each in value]
    if not isinstance(value, dict):
        return value
    if get_origin(type) is Mapping:  # tables by their names
        return {name: _of_type(each, cls, secrets) for name, each in value.items()}
    return _of_class(value, cls, secrets)


def _classes(type: object) -> Iterator[_Class]:
    """Yield the attrs classes in a type such as ``Mapping[str, X]``."""
    if _is_class(type):
        yield type
    for each in get_args(type):
        yield from _classes(each)


def _is_class(type: object) -> TypeGuard[_Class]:
    return isinstance(type, builtins.type) and attrs.has(type)


def _by_name(value: object) -> object:
    if isinstance(value, dict):
        return {key: HIDDEN if may_be_secret(key) and each else _by_name(each) for key, each in value.items()}
    return [_by_name(each) for each in value] if isinstance(value, list) else value


def _of_provider(name: str, table: object, secrets: list[str]) -> object:
    try:
        cls = settings_class(name)
    except ImportError:  # a library is not installed
        cls = None
    if cls is not None and isinstance(table, dict):
        return _of_class(table, cls, secrets)
    if isinstance(table, dict):
        return {key: _unknown(key, value, secrets) for key, value in table.items()}
    return _unknown(name, table, secrets)


def _unknown(key: str, value: object, secrets: list[str]) -> object:
    secrets += (text for keys, text in leaves({key: value}) if is_secret(keys) or _RANDOM.fullmatch(text))
    return HIDDEN if value else value
