# SPDX-License-Identifier: Apache-2.0
"""Keys whose values may be secrets: what they are set to in a document of any format, and hiding that."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import yaml

from infranetes_common.redaction import HIDDEN, is_harmless

Leaf = tuple[tuple[str, ...], str]
"""The keys that lead to a value, the outermost first, and the value."""

_SECRET_KEY = re.compile(
    r"pass|pwd|secret|token|credential|private|auth(?!or(?!iz))|key|bearer|certificate.data|signature"
    r"|connection.?string|cookie|session.?id|(?:^|[_.-])(?:sas|pin|sig|pat)(?:$|[_.-])",
    re.IGNORECASE,
)
_HARMLESS_KEY = re.compile(
    r"(?:_file|_path|_dir|_endpoint|-file|File|_conf|_type|_method|_version|Path|Type|_?ur[il]|Ur[il]"
    r"|[hH]elpers?|credsStore|_name|-name|Name)$"
    r"|^(?:OLD)?PWD$|/.*\.(?:json|txt)$"  # the shell's directory, a bundle's file
    r"|\S\s+\S+\s+\S+\s+\S+\s+\S"  # a sentence
)
# Tables of secrets, in which every key is one unless its name says otherwise.
_CONTAINER_KEY = re.compile(
    r"(?:pass(?:word|wd|phrase)?|secret|token|credential)s?(?:[_-]?(?:data|map|values?))?$", re.IGNORECASE
)
_PLAIN_KEY = re.compile(
    r"type$|ur[il]$|name$|id$|mail$|user|region|version|kind|expir|domain|project|audience|scope|file$|path$",
    re.IGNORECASE,
)
_NAMED = (("name", "value"), ("Name", "Value"), ("key", "value"), ("Key", "Value"))
_FLAG = re.compile(r"--?\w[\w.-]*")


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


def mapped(document: object, change: Callable[[str], str]) -> object:
    """Return a JSON document in which each text, and each key, is changed, and secrets are hidden."""
    return _mapped(document, (), change)


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
        for key, each in _meant(pairs):
            yield from _leaves(each, (*keys, key), seen)
    else:
        for _, meant, each in _arguments(_list(value), keys):
            yield from _leaves(each, meant, seen)


def _mapped(value: object, keys: tuple[str, ...], change: Callable[[str], str]) -> object:
    if isinstance(value, Mapping):
        meant = _meant([(str(key), each) for key, each in value.items()])
        # What our documents call just a key is a name or a digest.
        below = [(*keys, "name" if key == "key" else key) for key, _ in meant]
        return {
            change(str(key)): _mapped(each, one, change)
            for (key, each), one in zip(value.items(), below, strict=True)
        }
    if isinstance(value, list | tuple):
        return [_argument(*each, change) for each in _arguments(value, keys)]
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return value
    if keys and is_secret(keys) and not is_harmless(str(value)):
        return HIDDEN
    return change(value) if isinstance(value, str) else value


def _argument(flag: str, keys: tuple[str, ...], value: object, change: Callable[[str], str]) -> object:
    """Return an item of a list, changed."""
    if not flag:
        return _mapped(value, keys, change)
    return change(flag) if value is None else f"{change(flag)}{_mapped(value, keys, change)}"


def _pairs(value: object) -> Sequence[tuple[str, object]] | None:
    """Return a mapping's pairs; None: it is no mapping."""
    if isinstance(value, Table):
        return value.pairs
    if isinstance(value, Mapping):
        return [(str(key), each) for key, each in value.items()]
    if isinstance(value, yaml.MappingNode):
        return [(str(key.value), each) for key, each in value.value]
    return None


def _meant(pairs: Sequence[tuple[str, object]]) -> list[tuple[str, object]]:
    """Return a mapping's pairs with the keys that they stand for: in {"name": KEY, "value": VALUE}, as of an
    environment variable, the value is that of KEY."""
    by_key = dict(pairs)
    meant: dict[str, str] = {}
    for name, value in _NAMED:
        key = _scalar(by_key.get(name))
        if value in by_key and isinstance(key, str):
            meant[name] = "name"
            if value not in meant or may_be_secret(key):
                meant[value] = key
    return [(meant.get(key, key), each) for key, each in pairs]


def _arguments(
    values: Sequence[object], keys: tuple[str, ...]
) -> Iterator[tuple[str, tuple[str, ...], object]]:
    """Yield a list's values, each with the flag before it in its text, "" or as `--KEY=`, and the keys that
    lead to it: an argument after `--KEY` is that key's value. A flag alone has the value None."""
    is_known = bool(keys) and is_secret(keys)  # and may begin with a dash
    last = ""
    for each in values:
        text = _scalar(each)
        flag, equals, given = text.partition("=") if isinstance(text, str) and not is_known else ("", "", "")
        if not _FLAG.fullmatch(flag):
            yield "", (*keys, last) if last else keys, each
            last = ""
        elif equals:
            yield f"{flag}=", (*keys, flag), given
            last = ""
        else:
            yield flag, keys, None
            last = flag


def _list(value: object) -> Sequence[object]:
    if isinstance(value, yaml.SequenceNode):
        found: Sequence[object] = value.value
        return found
    return value if isinstance(value, list | tuple) else []


def _scalar(value: object) -> object:
    return str(value.value) if isinstance(value, yaml.ScalarNode) else value
