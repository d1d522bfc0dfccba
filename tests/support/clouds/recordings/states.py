# SPDX-License-Identifier: Apache-2.0
"""The states of the resources in a recording, and their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations

import attrs

from tests.support.clouds.recordings.wire import Call, Value

# How EC2 shows a resource: the fields with its id and its state, and one that only this kind has.
_EC2 = (
    ("attachment", "volumeId", ("status",), "attachTime"),
    ("growth", "volumeId", ("modificationState",), "modificationState"),
    ("volume", "volumeId", ("status",), "size"),
    ("instance", "instanceId", ("instanceState", "name"), "instanceState"),
    ("instance", "instanceId", ("currentState", "name"), "currentState"),
)


@attrs.frozen
class States:
    """Those of all resources of one kind.

    :ivar seen: all states. :ivar orders: pairs of which some resource had the first before the second.
    """

    seen: frozenset[str]
    orders: frozenset[tuple[str, str]]


def states(calls: Iterable[Call]) -> Mapping[str, States]:
    """Return the states of resources by their kinds."""
    lives: dict[tuple[str, str], list[str]] = {}
    for call in calls:
        for kind, id, state in _things(call.answer):
            life = lives.setdefault((kind, id), [])
            if life[-1:] != [state]:
                life.append(state)
    found: dict[str, States] = {}
    for (kind, _), life in lives.items():
        known = found.get(kind, States(frozenset(), frozenset()))
        orders = {(one, other) for one, other in combinations(life, 2) if one != other}
        found[kind] = States(known.seen | set(life), known.orders | orders)
    return found


def _things(value: Value) -> Iterator[tuple[str, str, str]]:
    """Yield the kinds, ids and states of the resources in a structure."""
    if isinstance(value, Mapping):
        thing = _of_google(value) or _of_ec2(value)
        if thing is not None:
            yield thing
        for inner in value.values():
            yield from _things(inner)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            yield from _things(inner)


def _of_google(value: Mapping[str, Value]) -> tuple[str, str, str] | None:
    kind, id, state = (value.get(name) for name in ("kind", "id", "status"))
    if isinstance(kind, str) and isinstance(id, str) and isinstance(state, str):
        return kind, id, state
    return None


def _of_ec2(value: Mapping[str, Value]) -> tuple[str, str, str] | None:
    for kind, id_field, path, own in _EC2:
        if own not in value or id_field not in value:
            continue
        state: Value = value
        for name in path:
            state = state.get(name) if isinstance(state, Mapping) else None
        if isinstance(state, str):
            return kind, str(value[id_field]), state
    return None
