# SPDX-License-Identifier: Apache-2.0
"""Lists in pages. Their tokens stay valid while entries are added and removed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol, TypeVar

from infranetes.providers.volumes import is_volume_id
from infranetes_common.errors import InvalidArgument
from txgrpc import Code, GrpcError

_AFTER = "after:"  # followed by an id


class HasId(Protocol):
    """An entry of a list that is ordered by id."""

    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=HasId)


def page(entries: Sequence[T], most: int, token: str) -> tuple[Sequence[T], str]:
    """Return a page of entries, which are in the order of their ids, and the next page's token; "": the last.

    :param most: how many entries; 0: all. :param token: from an earlier page; "": the first page.
    :raise InvalidArgument: `most` can't be. :raise GrpcError: ABORTED: the token is none of ours."""
    if most < 0:
        raise InvalidArgument(f"max_entries: {most} is less than 0")
    if token:
        if not (token.startswith(_AFTER) and is_volume_id(token.removeprefix(_AFTER))):
            raise GrpcError(
                Code.ABORTED, "starting_token: it was not issued by this driver; list from the beginning"
            )
        entries = entries[bisect_right([each.id for each in entries], token.removeprefix(_AFTER)) :]
    shown = entries[:most] if most else entries
    return shown, f"{_AFTER}{shown[-1].id}" if len(shown) < len(entries) else ""
