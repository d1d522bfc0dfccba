# SPDX-License-Identifier: Apache-2.0
"""Answers of clouds that were recorded by libcloud's own tests."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from tests.support.clouds import wheels

RELEASE = "apache-libcloud"  # the wheel has the same recordings as the source distribution
_DIRECTORY = "libcloud/test/compute/fixtures/gce/"
Shape = dict[str, set[str]]
"""Types by path: `networkInterfaces[].networkIP` is a `str`."""


def answers() -> list[Any]:
    """Return all answers of Compute Engine."""
    with zipfile.ZipFile(wheels.wheel(RELEASE)) as archive:
        names = [
            name for name in archive.namelist() if name.startswith(_DIRECTORY) and name.endswith(".json")
        ]
        return [json.loads(archive.read(name)) for name in names]


@lru_cache
def fixture(path: str) -> Any:
    """Return an answer of another cloud that libcloud's own tests recorded. :param path: CLOUD/FILE.json."""
    with zipfile.ZipFile(wheels.wheel(RELEASE)) as archive:
        return json.loads(archive.read(f"libcloud/test/compute/fixtures/{path}"))


def resources(answer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the resources in an answer with their kinds."""
    if isinstance(answer, dict):
        if isinstance(answer.get("kind"), str):
            yield answer["kind"], answer
        for value in answer.values():
            yield from resources(value)
    elif isinstance(answer, list):
        for value in answer:
            yield from resources(value)


def shape(resource: Any) -> Shape:
    """Return the types in a resource, without resources within it. Labels may have any names."""
    found: Shape = {}
    for key, value in resource.items():
        _add(found, "*" if "/" in key else key, value)
    return found


def _add(found: Shape, path: str, value: Any) -> None:
    found.setdefault(path, set()).add(type(value).__name__)
    if isinstance(value, list):
        for each in value:
            _add(found, f"{path}[]", each)
    elif isinstance(value, dict) and "kind" not in value and not path.endswith("labels"):
        for key, each in value.items():
            _add(found, f"{path}.{'*' if '/' in key else key}", each)


def merge(into: Shape, more: Shape) -> None:
    """Add a shape to another."""
    for path, types in more.items():
        into.setdefault(path, set()).update(types)
