# SPDX-License-Identifier: Apache-2.0
"""A pod's user namespace, as the CRI asks for it: the mapping of ids inside to ids outside.

Outside is the node, and also the VM, since a pod has the VM to itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri

_END = 2**32 - 1  # the one number that is not an id


@attrs.frozen
class IdRange:
    """A range of ids: those from 0 on inside are those from `first` on outside."""

    first: int
    length: int

    def outside(self, id: int) -> int:
        """Return the id outside that stands for `id`.

        Ids beyond the range are mapped one to one to the ids outside that stand for none inside, so that none
        is lost on the way there and back.
        """
        if id < self.length:
            return self.first + id
        return id - self.length if id < self.first + self.length else id

    def inside(self, id: int) -> int:
        """Return the id whose `outside` is `id`."""
        if self.first <= id < self.first + self.length:
            return id - self.first
        return id + self.length if id < self.first else id


@attrs.frozen
class UserNamespace:
    """The user and group ids of a user namespace."""

    uids: IdRange
    gids: IdRange


def user_namespace(options: cri.NamespaceOption, field: str) -> UserNamespace | None:
    """Return the user namespace of a pod or container; None: that of its VM.

    :param field: the name of `options` in errors.
    :raise InvalidArgument: it is malformed or not supported; names the field."""
    users, named = options.userns_options, f"{field}.userns_options"
    if not options.HasField("userns_options"):
        return None
    if users.mode == cri.NODE:
        if users.uids or users.gids:
            raise InvalidArgument(f"{named}: NODE allows no mappings of ids")
        return None
    if users.mode != cri.POD:
        raise InvalidArgument(
            f"{named}.mode: {_name(users.mode)}: a user namespace is the pod's (POD) or the node's (NODE)"
        )
    found = UserNamespace(_range(users.uids, f"{named}.uids"), _range(users.gids, f"{named}.gids"))
    for other in ("pid", "ipc"):
        if getattr(options, other) == cri.NODE:
            raise InvalidArgument(
                f"{field}.{other}: NODE: a pod with a user namespace has no access to the VM's own; "
                "leave hostPID and hostIPC out, or hostUsers: false"
            )
    return found


def mapped_ids(
    uids: Sequence[cri.IDMapping], gids: Sequence[cri.IDMapping], field: str
) -> UserNamespace | None:
    """Return the ids of a mount; None: it has no mappings. :raise InvalidArgument: they are malformed."""
    if not uids and not gids:
        return None
    return UserNamespace(_range(uids, f"{field}: uidMappings"), _range(gids, f"{field}: gidMappings"))


def _range(mappings: Sequence[cri.IDMapping], field: str) -> IdRange:
    if len(mappings) != 1:
        raise InvalidArgument(f"{field}: {len(mappings)} mappings of ids: exactly one is supported")
    only = mappings[0]
    if only.container_id:
        raise InvalidArgument(
            f"{field}: container_id is {only.container_id}: the mapping has to begin with 0"
        )
    if not only.length or only.host_id + only.length > _END:
        raise InvalidArgument(
            f"{field}: {only.length} ids from host_id {only.host_id} on: at least one is needed, and all "
            f"have to be below {_END}"
        )
    return IdRange(only.host_id, only.length)


def _name(mode: int) -> str:
    return cri.NamespaceMode.Name(mode) if mode in cri.NamespaceMode.values() else str(mode)
