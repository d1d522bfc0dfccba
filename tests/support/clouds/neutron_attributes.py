# SPDX-License-Identifier: Apache-2.0
"""Neutron's own tables of its resources' attributes, with which requests and simulated answers are checked.

They are in neutron-lib's release. Its modules import most of OpenStack's libraries, so the tables are read
from the source code, as far as they are literals.
"""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import attrs

from tests.support.clouds import wheels

RELEASE = "neutron-lib"
_DEFINITIONS = "neutron_lib/api/definitions/"
_MODULES = {
    "floatingips": ("l3", "FLOATINGIPS"),
    "networks": ("network", "COLLECTION_NAME"),
    "ports": ("port", "COLLECTION_NAME"),
    "subnets": ("subnet", "COLLECTION_NAME"),
}
# What all resources also have (source: Networking API, "Standard attributes", "Filtering").
_SET = {"description"}
_SHOWN = {*_SET, "created_at", "updated_at", "revision_number", "tags", "project_id"}
_QUERY = {"fields", "limit", "marker", "sort_key", "sort_dir"}


@attrs.frozen
class Attributes:
    """The names of a resource's attributes, by what can be done with them."""

    post: frozenset[str]
    put: frozenset[str]
    filter: frozenset[str]
    visible: frozenset[str]


@lru_cache
def attributes(kind: str) -> Attributes:
    """Return the attributes of `floatingips`, `networks` or `ports`."""
    module, key = _MODULES[kind]
    with zipfile.ZipFile(wheels.wheel(RELEASE)) as archive:
        tree = ast.parse(archive.read(f"{_DEFINITIONS}{module}.py"))
    [table] = [
        value
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for name, value in zip(node.keys, node.values, strict=True)
        if isinstance(name, ast.Name) and name.id == key and isinstance(value, ast.Dict)
    ]
    told = dict(_attributes(table))
    return Attributes(
        *(
            frozenset(name for name, flags in told.items() if flags.get(flag)) | standard
            for flag, standard in (
                ("allow_post", _SET),
                ("allow_put", _SET),
                ("is_filter", _SHOWN),
                ("is_visible", _SHOWN),
            )
        )
    )


def _attributes(table: ast.Dict) -> Iterable[tuple[str, Mapping[str, bool]]]:
    for name, value in zip(table.keys, table.values, strict=True):
        if isinstance(name, ast.Constant) and isinstance(value, ast.Dict):
            yield (
                str(name.value),
                {
                    str(flag.value): bool(setting.value)
                    for flag, setting in zip(value.keys, value.values, strict=True)
                    if isinstance(flag, ast.Constant) and isinstance(setting, ast.Constant)
                },
            )


def wrong(method: str, kind: str, query: Mapping[str, str], body: Mapping[str, object]) -> list[str]:
    """Describe what is wrong with a request for resources of a kind."""
    known = attributes(kind)
    allowed = known.post if method == "POST" else known.put
    sent = body.get(kind.removesuffix("s"), {})
    assert isinstance(sent, Mapping)
    names = {"it can't be set": set(sent) - allowed, "no filter": set(query) - known.filter - _QUERY}
    fields = {query["fields"]} if "fields" in query else set()
    return [
        f"{method} {kind}: {words}: {', '.join(sorted(found))}"
        for words, found in {**names, "no field": fields - known.visible}.items()
        if found
    ]


def wrong_answer(kind: str, answer: Mapping[str, Any] | None) -> list[str]:
    """Describe what the resources in an answer have that Neutron's do not have."""
    shown = [] if answer is None else answer[kind] if kind in answer else [answer[kind.removesuffix("s")]]
    names = {name for one in shown for name in one} - attributes(kind).visible
    return [f"{kind} have no {name}" for name in sorted(names)]
