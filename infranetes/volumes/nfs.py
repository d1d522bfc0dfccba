# SPDX-License-Identifier: Apache-2.0
"""Recognizing NFS volumes among the node's mounts.

kubelet, or a CSI driver, has mounted an export at `pods/UID/volumes/PLUGIN/NAME` or in there. A subPath
is bound to `pods/UID/volume-subpaths/NAME/CONTAINER/INDEX`: the mount table then names the server's directory
as the source, and the same file system.

Nothing here looks into what is mounted: a server that is gone delays nobody.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import attrs

from infranetes.volumes.mount_table import Mount, MountTable, mount_of
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument
from infranetes_common.filesync.manifest import check_path
from infranetes_common.nfs import MOUNT_FLAGS, NfsMount, checked
from infranetes_common.paths import resolve

_TYPES = frozenset({"nfs", "nfs4"})
_PATH = re.compile(
    r"(?P<pod>/(.*/)?pods/(?P<uid>[^/]+))/"
    r"(?P<inner>volumes/(?!kubernetes\.io~(empty-dir|secret|configmap|projected|downward-api)/)[^/]+/[^/]+(/mount)?|"
    r"volume-subpaths/(?P<name>[^/]+)/[^/]+/[0-9]+)"
)
# Options of the node's mount that a VM's does not get: they are expressed otherwise, or are the node's own.
_LEFT_OUT = frozenset(
    {"rw", "ro", "relatime", "namlen", "clientaddr", "fsc", "seclabel", "trunkdiscovery", "migration",
     "context", "fscontext", "defcontext", "rootcontext"}
)  # fmt: skip
_DEFAULTS = frozenset({"xprtsec=none", "fatal_neterrors=none", "fatal_neterrors=ENETDOWN:ENETUNREACH"})


@attrs.frozen
class NfsVolume:
    """The NFS volume, or the part of one, that a container mounts.

    :ivar below: the path of the part in the volume, without `..`; "": all of the volume."""

    mount: NfsMount
    below: str
    read_only: bool


def may_be_nfs(path: str, uid: str) -> bool:
    """Return whether `find_nfs` has to look for a pod with this UID."""
    found = _PATH.fullmatch(path)
    return found is not None and found["uid"] == uid and os.path.normpath(path) == path


def find_nfs(path: str, uid: str, table: MountTable) -> NfsVolume | None:
    """Find the NFS volume of the pod with this UID that a path of the node is, or lies in. Blocks.

    None: the path lies in none of them.

    :raise InvalidArgument: :raise FailedPrecondition: it can't be mounted in a VM; the message says why."""
    found = _PATH.fullmatch(path)
    if found is None or not may_be_nfs(path, uid):
        return None
    try:
        pod = resolve(found["pod"])
        mounts = table.mounts()
    except OSError as error:
        raise FailedPrecondition(f"{path} can't be looked at: {error.strerror}") from None
    point = os.fsencode(f"{pod}/{found['inner']}")
    mount = mount_of(mounts, point)
    if mount.fs_type not in _TYPES or not mount.mount_point.startswith(os.fsencode(f"{pod}/")):
        return None
    whole = mount if found["name"] is None else _whole(mounts, mount, f"{pod}/volumes", found["name"])
    inner = mount.source[len(whole.source) :] + point[len(mount.mount_point) :]
    wanted = _checked(whole)
    below = _below(inner)
    return NfsVolume(wanted, below, not mount.writable or b"ro" in mount.super_options.split(b","))


def _whole(mounts: Sequence[Mount], part: Mount, directory: str, name: str) -> Mount:
    """Return the volume that a subPath is of."""
    point = re.compile(rf"{re.escape(directory)}/[^/]+/{re.escape(name)}(/mount)?")
    for one in mounts:
        above = one.source.rstrip(b"/") + b"/"
        if (
            (one.device, one.fs_type) == (part.device, part.fs_type)
            and point.fullmatch(os.fsdecode(one.mount_point))
            and (part.source + b"/").startswith(above)
        ):
            return one
    raise FailedPrecondition(
        f"a part of volume {name} is mounted, from {part.source[:200]!r}, but not the volume: recreate the "
        "pod, so that kubelet mounts the volume again"
    )


def _below(inner: bytes) -> str:
    try:
        return check_path(inner.strip(b"/")).decode() if inner.strip(b"/") else ""
    except (InvalidArgument, UnicodeDecodeError):
        raise InvalidArgument(f"subPath {inner[:200]!r} can't be a path in a VM") from None


def _checked(mount: Mount) -> NfsMount:
    try:
        source, given = mount.source.decode(), mount.super_options.decode()
        options = {one for one in given.split(",") if one and one not in _DEFAULTS}
        options |= set(mount.options.decode().split(",")) & set(MOUNT_FLAGS)
    except UnicodeDecodeError:
        raise FailedPrecondition(
            f"{mount.source[:200]!r} is no UTF-8, and can't be mounted in a VM"
        ) from None
    try:
        return checked(source, (one for one in options if one.partition("=")[0] not in _LEFT_OUT))
    except InfranetesError as error:
        raise type(error)(f"this NFS volume can't be mounted in a VM: {error}") from None
