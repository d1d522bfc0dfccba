# SPDX-License-Identifier: Apache-2.0
"""Owners of files as the node has them, and as they are in the VM of a pod with a user namespace.

What belongs to user 0 on the node belongs to the pod's user 0, who is another one in the VM. With mounts that
map ids it would be so without a change of files; in a VM's memory (tmpfs) kernels before 6.3 have none. All
containers of a VM have the same ids, and so files come with those that they have for the pod.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import attrs

from infranetes_common.filesync.manifest import Change, Entry, Manifest
from infranetes_common.user_namespaces import UserNamespace

C = TypeVar("C", bound=Change)


def for_pod(change: C, users: UserNamespace | None) -> C:
    """Return a change with the owner that it has in the VM."""
    if users is None or not isinstance(change, Entry):
        return change
    return attrs.evolve(change, uid=users.uids.outside(change.uid), gid=users.gids.outside(change.gid))


def from_pod(change: C, users: UserNamespace | None) -> C:
    """Return a change with the owner that it has on the node."""
    if users is None or not isinstance(change, Entry):
        return change
    return attrs.evolve(change, uid=users.uids.inside(change.uid), gid=users.gids.inside(change.gid))


def all_for_pod(entries: Iterable[Entry], users: UserNamespace) -> list[Entry]:
    """Return entries with the owners that they have in the VM. Takes some time for many."""
    return [for_pod(entry, users) for entry in entries]


def inside(manifest: Manifest, users: UserNamespace) -> Manifest:
    """Return what a VM has with the owners on the node. Takes some time for a large volume."""
    return {path: from_pod(entry, users) for path, entry in manifest.items()}
