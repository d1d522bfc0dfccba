# SPDX-License-Identifier: Apache-2.0
"""Configuration classes as the keys that a person writes."""

from __future__ import annotations

import re
import types
import typing
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import attrs

from infranetes_common.config import Bytes


def literal(value: Any) -> str:
    """A default as it is written in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | Path | IPv4Network):
        return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple | list):
        return "[" + ", ".join(literal(each) for each in value) + "]"
    if value is None or isinstance(value, dict):
        return ""
    return repr(value)


def size(value: int) -> str:
    """A number of bytes as people write it, where it has no more digits so."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value and value % 1024**power == 0:
            return f'"{value // 1024**power}{unit}"'
    return str(value)


def _class_in(annotation: Any) -> type | None:
    """The attrs class that an annotation is or may be: Config, Config | None."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((each for each in options if isinstance(each, type) and attrs.has(each)), None)


def defaults(config: Any, prefix: str = "") -> dict[str, str]:
    """Every dotted key of an instance of a configuration class that has its defaults, with its default
    in TOML; of a class that has to be given: "" for what it requires."""
    hints = typing.get_type_hints(type(config))
    found = {}
    for field in attrs.fields(type(config)):
        key, value = prefix + field.name, getattr(config, field.name)
        if _class_in(hints[field.name]) is not None and value is not None:
            found.update(defaults(value, f"{key}."))
        else:
            found[key] = size(value) if hints[field.name] is Bytes else literal(value)
    return found


def documented(text: str, heading: str) -> dict[str, str]:
    """Key and default of each row of the tables below a `## heading`: | `key` | `default` | words |."""
    section = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", text, flags=re.M | re.S)
    if section is None:
        raise AssertionError(f"no heading {heading!r}")
    rows = re.findall(r"^\| `([^`]+)` \| (?:`([^`]*)`|) *\| (.+) \|$", section[1], flags=re.M)
    keys = [key for key, _, _ in rows]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise AssertionError(f"{heading}: {', '.join(twice)}: more than once")
    return {key: default for key, default, _ in rows}
