# SPDX-License-Identifier: Apache-2.0
"""Keys whose values may be secrets, and what they are set to in a document of any format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import attrs
import yaml

Leaf = tuple[tuple[str, ...], str]
"""The keys that lead to a value, the outermost first, and the value."""

_SECRET_KEY = re.compile(
    r"pass|pwd|secret|token|credential|private|auth(?!or(?!iz))|key|bearer|certificate.data"
    r"|connection.?string|cookie|(?:^|[_.-])(?:sas|pin|sig|pat)(?:$|[_.-])",
    re.IGNORECASE,
)
_HARMLESS_KEY = re.compile(
    r"(?:_file|_path|_dir|_endpoint|-file|File|_conf|_type|_method|_version|Path|Type|_?ur[il]|Ur[il]"
    r"|[hH]elpers?|credsStore)$"
)
# Tables of secrets, in which every key is one unless its name says otherwise.
_CONTAINER_KEY = re.compile(r"pass|secret|token|credential", re.IGNORECASE)
_PLAIN_KEY = re.compile(
    r"type$|ur[il]$|name$|id$|mail$|user|region|version|kind|expir|domain|project|audience|scope|file$|path$",
    re.IGNORECASE,
)


@attrs.frozen
class Table:
    """A mapping with all its pairs, even if several have one key."""

    pairs: Sequence[tuple[str, object]]


def may_be_secret(key: str) -> bool:
    """Return whether a key's value may be a secret, and not merely its path, address or kind."""
    return bool(_SECRET_KEY.search(key)) and not _HARMLESS_KEY.search(key)


def is_secret(keys: Sequence[str]) -> bool:
    """Return whether the value that these keys lead to may be a secret."""
    if may_be_secret(keys[-1]):
        return True
    return any(map(_CONTAINER_KEY.search, keys[:-1])) and not _PLAIN_KEY.search(keys[-1])


def leaves(document: object) -> Iterator[Leaf]:
    """Yield the values of a document that are below keys. What YAML shares or nests in itself comes once."""
    yield from _leaves(document, (), set())


def _leaves(value: object, keys: tuple[str, ...], seen: set[int]) -> Iterator[Leaf]:
    if isinstance(value, yaml.ScalarNode):
        value = str(value.value)
    if isinstance(value, str | int | float):
        if keys and not isinstance(value, bool):
            yield keys, str(value)
        return
    if isinstance(value, yaml.Node):
        if id(value) in seen:
            return
        seen.add(id(value))
    pairs = _pairs(value)
    if pairs is not None:
        for key, each in [*pairs, *_named(pairs)]:
            yield from _leaves(each, (*keys, key), seen)
    else:
        yield from _items(value, keys, seen)


def _pairs(value: object) -> Sequence[tuple[str, object]] | None:
    """Return a mapping's pairs; None: it is no mapping."""
    if isinstance(value, Table):
        return value.pairs
    if isinstance(value, Mapping):
        return [(str(key), each) for key, each in value.items()]
    if isinstance(value, yaml.MappingNode):
        return [(str(key.value), each) for key, each in value.value]
    return None


def _named(pairs: Sequence[tuple[str, object]]) -> Iterator[tuple[str, object]]:
    """Yield the pair that a mapping with `name` and `value` stands for, as for environment variables."""
    by_key = dict(pairs)
    if {"name", "value"} <= by_key.keys():
        name = by_key["name"]
        name = name.value if isinstance(name, yaml.ScalarNode) else name
        yield str(name), _scalar(by_key["value"])


def _items(value: object, keys: tuple[str, ...], seen: set[int]) -> Iterator[Leaf]:
    """Yield the values of a list. An argument after `--KEY` is that key's value."""
    flag = ""
    for each in _list(value):
        text = _scalar(each)
        if isinstance(text, str) and text.startswith("-"):
            key, equals, given = text.partition("=")
            if equals:
                yield (*keys, key), given
            flag = "" if equals else key
            continue
        yield from _leaves(each, (*keys, flag) if flag else keys, seen)
        flag = ""


def _list(value: object) -> Sequence[object]:
    if isinstance(value, yaml.SequenceNode):
        found: Sequence[object] = value.value
        return found
    return value if isinstance(value, list | tuple) else []


def _scalar(value: object) -> object:
    return str(value.value) if isinstance(value, yaml.ScalarNode) else value
