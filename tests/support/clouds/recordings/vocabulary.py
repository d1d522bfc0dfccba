# SPDX-License-Identifier: Apache-2.0
"""What is known to be harmless in a cloud's requests and answers: the words of its API's own published
description. Anything else may be a secret."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import attrs
from botocore.model import ListShape, StructureShape

from infranetes.providers.cloud.interface import ADDRESS, CLUSTER, NODE, SANDBOX, TOKEN
from tests.support.clouds import discovery, ec2_model
from tests.support.clouds.recordings.wire import AWS

OWN = frozenset((ADDRESS, CLUSTER, NODE, SANDBOX, TOKEN))  # names of tags

# Fields with numbers that any account can have, in both APIs.
NUMBERS = frozenset(
    (
        *("code", "httperrorstatuscode", "progress"),
        *("size", "sizegb", "disksizegb", "volumesize", "iops", "throughput"),
        *("corecount", "threadspercore", "guestcpus", "memorymb", "httpputresponsehoplimit"),
    )
)
_LONGEST_NUMBER = 6  # digits: an account's or project's number is longer

# Fields with the code of an error, which descriptions do not list; and the words of codes that are not names.
_CODES = {"aws": frozenset(("code",)), "gcp": frozenset(("code", "reason", "domain"))}
_WORDS_OF_CODES = frozenset(
    re.findall(
        r"\w+",
        """
        already amiid another auth authorized be busy by cannot count dry duplicate empty error exceeded
        exhausted exists failed failure fault found global idempotent in incorrect insufficient internal
        invalid limit low malformed match max mismatch missing not operation parameter permission pool quota
        rate ready required resource server spot stockout supported temporarily throttled throttling too
        unauthorized unavailable unknown unsupported used value vcpu zone
        """,
    )
)
# Elements that EC2's model does not name, which surround every answer, or every error.
_AROUND = frozenset(
    ("Response", "Errors", "Error", "Code", "Message", "RequestID", "requestId", "xmlns", "item")
)
_AROUND_GOOGLES = frozenset(
    ("error", "errors", "code", "message", "domain", "reason", "locationType", "query")
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]{0,63}")
_CODE = re.compile(r"[A-Za-z][A-Za-z0-9._]{1,79}")
_SHORTEST = 2  # letters of a word: random text has all single letters


@attrs.frozen
class Vocabulary:
    """The vocabulary of one API.

    :ivar names: its fields. :ivar values: the values that it lists, by the field in lower case.
    :ivar words: the words of names, in lower case. :ivar kinds: the kinds of requests.
    :ivar codes: the fields with error codes, in lower case.
    """

    names: frozenset[str]
    values: Mapping[str, frozenset[str]]
    words: frozenset[str]
    kinds: frozenset[str]
    codes: frozenset[str]

    def is_name(self, text: str) -> bool:
        """Return whether it is a field's name, or could be a new one's: it consists of other names' words."""
        return text in self.names or (_NAME.fullmatch(text) is not None and self._is_of_words(text))

    def is_value(self, field: str, text: str) -> bool:
        """Return whether it is a value that the API lists for this field, or a code."""
        lowered = field.lower()
        if text in self.values.get(lowered, ()) or (lowered == "key" and text in OWN):
            return True
        return lowered in self.codes and _CODE.fullmatch(text) is not None and self._is_of_words(text)

    def is_number(self, field: str, digits: str) -> bool:
        """Return whether it is a number that reveals nothing about the account."""
        return field.lower() in NUMBERS and len(digits) <= _LONGEST_NUMBER

    def _is_of_words(self, text: str) -> bool:
        words = [word.lower() for word in _WORD.findall(text)]
        return bool(words) and all(word in self.words or word in _WORDS_OF_CODES for word in words)


@lru_cache
def vocabulary(cloud: str) -> Vocabulary:
    """Return the vocabulary of EC2, or of Compute Engine."""
    return _of_ec2() if cloud == AWS else _of_compute()


def _of_ec2() -> Vocabulary:
    model = ec2_model.model()
    names, values = set(_AROUND), dict[str, set[str]]()
    for shape in map(model.shape_for, model.shape_names):
        if not isinstance(shape, StructureShape):
            continue
        for member, inner in shape.members.items():
            written = {
                member,
                inner.serialization.get("name", member),
                inner.serialization.get("queryName", member),
            }
            written |= {name[:1].upper() + name[1:] for name in written}
            names |= written
            enumerated = inner.member if isinstance(inner, ListShape) else inner
            _add(values, written, getattr(enumerated, "enum", ()))
    kinds = frozenset(model.operation_names)
    return _made(names | {f"{kind}Response" for kind in kinds}, values, kinds, AWS)


def _of_compute() -> Vocabulary:
    document = discovery.compute().document
    names, values = set(_AROUND_GOOGLES), dict[str, set[str]]()
    for name, schema in _properties(document["schemas"].values()):
        names.add(name)
        _add(values, {name}, schema.get("enum") or schema.get("items", {}).get("enum") or ())
        if name == "kind" and "default" in schema:
            _add(values, {name}, (schema["default"],))
    methods = list(discovery.methods(document["resources"]))
    names |= set(document["parameters"]).union(*(method["parameters"] for method in methods))
    return _made(names, values, frozenset(str(method["id"]) for method in methods), "gcp")


def _properties(schemas: Iterable[Any]) -> Iterator[tuple[str, Any]]:  # Any: JSON
    """Yield all properties of schemas, including those of nested ones."""
    for schema in schemas:
        for name, each in schema.get("properties", {}).items():
            yield name, each
            yield from _properties((each, each.get("items", {})))


def _add(values: dict[str, set[str]], fields: Iterable[str], listed: Iterable[str]) -> None:
    found = set(listed)
    for field in fields if found else ():
        values.setdefault(field.lower(), set()).update(found)


def _made(names: set[str], values: Mapping[str, set[str]], kinds: frozenset[str], cloud: str) -> Vocabulary:
    written = {word for name in names | kinds for word in _WORD.findall(name)}
    words = frozenset(word.lower() for word in written if len(word) >= _SHORTEST and word.isalpha())
    listed = {field: frozenset(each) for field, each in values.items()}
    return Vocabulary(frozenset(names), listed, words, kinds, _CODES[cloud])
