# SPDX-License-Identifier: Apache-2.0
"""Google's own descriptions of its APIs, with which requests and answers are checked.

They are the discovery documents that google-api-python-client's release has. Nothing else of that library is
used.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import Any

import attrs

from tests.support.clouds import wheels

RELEASE = "google-api-python-client"
_DOCUMENT = "googleapiclient/discovery_cache/documents/{}.v1.json"
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
_FORMATS = {"int64": r"-?[0-9]+", "uint64": r"[0-9]+"}  # of strings
Json = Mapping[str, Any]
Kind = tuple[str, int]
"""A verb, and the number of slashes in a path."""


@lru_cache
def compute() -> Api:
    """Return Compute Engine's API. The first call takes long."""
    return _api("compute")


@lru_cache
def billing() -> Api:
    """Return Cloud Billing's API."""
    return _api("cloudbilling")


@lru_cache
def storage() -> Api:
    """Return Cloud Storage's API."""
    return _api("storage")


@lru_cache
def sts() -> Api:
    """Return the Security Token Service's API."""
    return _api("sts")


@lru_cache
def iam_credentials() -> Api:
    """Return the API of service accounts' credentials."""
    return _api("iamcredentials")


@cache  # re's own cache is smaller than an API
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _api(name: str) -> Api:
    with zipfile.ZipFile(wheels.wheel(RELEASE)) as archive:
        document = json.loads(archive.read(_DOCUMENT.format(name)))
    served: dict[Kind, list[tuple[str, Json]]] = {}
    for method in methods(document["resources"]):
        path = _path(method)
        served.setdefault((method["httpMethod"], path.count("/")), []).append((_pattern(method), method))
    return Api(document, served)


def methods(resources: Json) -> Iterator[Json]:
    """Yield the methods of resources, and of those within them."""
    for resource in resources.values():
        yield from resource.get("methods", {}).values()
        yield from methods(resource.get("resources", {}))


def _path(method: Json) -> str:
    return str(method.get("flatPath") or method["path"])


def _pattern(method: Json) -> str:
    """Return the pattern of a method's paths."""
    parts = re.split(r"\{(\w+)\}", _path(method))
    return "".join(
        f"(?:{method['parameters'].get(part, {}).get('pattern', '[^/]+')})" if number % 2 else re.escape(part)
        for number, part in enumerate(parts)
    )


@attrs.frozen
class Api:
    """An API, by its discovery document. :ivar served: what the paths of methods match."""

    document: Json
    served: Mapping[Kind, list[tuple[str, Json]]]

    def wrong(self, method: str, path: str, query: Mapping[str, str], body: Any, answer: Any) -> list[str]:
        """Describe what is wrong with a request and its answer. :param path: from `projects` on."""
        each = self._method(method, path)
        if each is None:
            return [f"nothing is served at {method} {path}"]
        found = [
            *self._query(each, query),
            *self._sent(each.get("request"), body),
            *self._value("the answer", each["response"], answer, answered=True),
        ]
        return [f"{each['id']}: {words}" for words in found]

    def named(self, method: str, path: str) -> str:
        """Return the name of the method served there, such as `compute.instances.get`; "": none."""
        each = self._method(method, path)
        return "" if each is None else str(each["id"])

    def _method(self, method: str, path: str) -> Json | None:
        served = self.served.get((method, path.count("/")), ())
        return next((each for pattern, each in served if _compiled(pattern).fullmatch(path)), None)

    def _query(self, method: Json, query: Mapping[str, str]) -> Iterator[str]:
        allowed = {
            **self.document["parameters"],
            **{name: each for name, each in method["parameters"].items() if each["location"] == "query"},
        }
        for name, value in query.items():
            if name not in allowed:
                yield f"no parameter is called {name}"
            elif allowed[name]["type"] == "integer" and not value.isdecimal():
                yield f"{name} is no number: {value}"
        for name, each in allowed.items():
            if each.get("required") and not query.get(name):
                yield f"{name} is missing"

    def _sent(self, schema: Json | None, body: Any) -> Iterator[str]:
        if schema is not None:
            yield from self._value("the body", schema, body)
        elif body:
            yield "it takes no body"

    def _value(self, where: str, schema: Json, value: Any, answered: bool = False) -> Iterator[str]:
        if "$ref" in schema:
            schema = self.document["schemas"][schema["$ref"]]
        kind = schema.get("type", "any")
        if not _is_of(kind, value):
            yield f"{where} is of type {type(value).__name__}, not {kind}"
        elif kind == "object":
            yield from self._object(where, schema, value, answered)
        elif kind == "array":
            for each in value:
                yield from self._value(f"{where}[]", schema["items"], each, answered)
        elif kind == "string":
            pattern = str(schema.get("pattern") or _FORMATS.get(schema.get("format", ""), ""))
            if schema.get("enum") and value not in schema["enum"]:
                yield f"{where} can't be {value}"
            if pattern and not _compiled(pattern).fullmatch(value):
                yield f"{where} does not match {pattern}: {value}"

    def _object(self, where: str, schema: Json, value: Json, answered: bool) -> Iterator[str]:
        properties, others = schema.get("properties", {}), schema.get("additionalProperties")
        for name, each in value.items():
            known = properties.get(name, others)
            if known is None:
                yield f"{where} has no {name}"
            elif known.get("readOnly") and not answered:
                yield f"{where}.{name} is what Google says, not what is asked for"
            else:
                yield from self._value(f"{where}.{name}", known, each, answered)


def _is_of(kind: str, value: object) -> bool:
    return kind not in _TYPES or type(value) in _TYPES[kind]
