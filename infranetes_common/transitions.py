# SPDX-License-Identifier: Apache-2.0
"""States whose transitions a table defines."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar

_State = TypeVar("_State", bound=enum.Enum)


class IllegalTransition(Exception):
    """A fault of this program: a state was to follow another that it can't follow."""


def follow(transitions: Mapping[_State, frozenset[_State]], before: _State, after: _State) -> _State:
    """Return `after`, if the table lets it follow `before`.

    :raise IllegalTransition: it does not.
    """
    if after not in transitions[before]:
        raise IllegalTransition(f"{type(before).__name__} {before.value} can't become {after.value}")
    return after
