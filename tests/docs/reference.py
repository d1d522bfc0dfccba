"""Configuration classes as the keys that a person writes."""

from __future__ import annotations

import re
import types
import typing
from pathlib import Path
from typing import Any

import attrs


def literal(value: Any) -> str:
    """A default as it is written in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | Path):
        return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple | list):
        return "[" + ", ".join(literal(each) for each in value) + "]"
    if value is None or isinstance(value, dict):
        return ""
    return repr(value)


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
        key, value = prefix + (field.alias or field.name), getattr(config, field.name)
        if _class_in(hints[field.name]) is not None and value is not None:
            found.update(defaults(value, f"{key}."))
        else:
            found[key] = literal(value)
    return found


def documented(text: str, heading: str) -> dict[str, str]:
    """Key and default of each row of the tables below a `## heading`: | `key` | `default` | words |."""
    section = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", text, flags=re.M | re.S)
    if section is None:
        raise AssertionError(f"no heading {heading!r}")
    rows = re.findall(r"^\| `([^`]+)` \| (?:`([^`]*)`|) *\| (.+) \|$", section[1], flags=re.M)
    return {key: default for key, default, _ in rows}
