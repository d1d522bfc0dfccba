# SPDX-License-Identifier: Apache-2.0
"""Shapes: which fields an answer has, and what their values look like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tests.support.clouds.recordings.scrub import form_of
from tests.support.clouds.recordings.wire import Value

FIELDS, LIST, LABEL = "fields", "a list", "a label"
_GOOGLES = "compute#"  # the prefix of the kinds of Google's resources

Shape = Mapping[str, set[str]]
"""What is at each path: `instancesSet[].instanceId` looks like `i-…`."""


def shape(value: Value) -> Shape:
    """Return the shape of a structure. Resources of Google's within it are left to `pieces`."""
    found: dict[str, set[str]] = {}
    _add(found, "", value)
    return found


def pieces(value: Value) -> Iterator[tuple[str, Value]]:
    """Yield, with their names, the parts of an answer that look alike wherever they occur: the whole, and
    Google's resources in it."""
    if _is_resource(value) or not isinstance(value, Mapping) or len(value) != 1:
        yield _kind(value), value
    else:
        yield from value.items()  # an XML element, or an error
    for each in _inside(value):
        yield _kind(each), each


def _inside(value: Value) -> Iterator[Value]:
    """Yield Google's resources inside a structure, without itself."""
    if isinstance(value, str) or not isinstance(value, Mapping | Sequence):
        return
    for each in value.values() if isinstance(value, Mapping) else value:
        if _is_resource(each):
            yield each
        yield from _inside(each)


def _kind(value: Value) -> str:
    return str(value.get("kind", "")) if isinstance(value, Mapping) else ""


def _is_resource(value: Value) -> bool:
    return _kind(value).startswith(_GOOGLES)


def _is_label(path: str, name: str) -> bool:
    """Return whether a name is a user's own: that of a label, or of a label-like field, with its dashes."""
    return path.endswith(("labels", "Labels")) or "-" in name


def _add(found: dict[str, set[str]], path: str, value: Value) -> None:
    forms = found.setdefault(path, set())
    if isinstance(value, Mapping):
        forms.add(FIELDS)
        for name, inner in value.items():
            if _is_label(path, name):
                found.setdefault(f"{path}.*".lstrip("."), set()).add(LABEL)
                continue
            at = f"{path}.{name}".lstrip(".")
            if _is_resource(inner):
                found.setdefault(at, set()).add(FIELDS)
            else:
                _add(found, at, inner)
    elif isinstance(value, str):
        forms.add(form_of(value))
    elif isinstance(value, Sequence):
        forms.add(LIST)
        for inner in value:
            if not _is_resource(inner):
                _add(found, f"{path}[]", inner)
    else:
        forms.add("null" if value is None else type(value).__name__)
