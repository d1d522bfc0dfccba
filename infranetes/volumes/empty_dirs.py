# SPDX-License-Identifier: Apache-2.0
"""Recognizing kubelet's emptyDirs among the node's paths.

kubelet has one at `pods/UID/volumes/kubernetes.io~empty-dir/NAME`. For a subPath it binds a part of that to
`pods/UID/volume-subpaths/NAME/CONTAINER/INDEX`: the mount table tells which part.
"""

from __future__ import annotations

import re

import attrs

from infranetes.volumes.mount_table import Layout, MountTable
from infranetes.volumes.mounts import Source, find_source
from infranetes_common.errors import InvalidArgument
from infranetes_common.filesync.manifest import check_path
from infranetes_common.wire import cri

_WHOLE = re.compile(r"(?P<pods>.*/pods)/(?P<uid>[^/]+)/volumes/kubernetes\.io~empty-dir/(?P<name>[^/]+)")
_PART = re.compile(r"(?P<pods>.*/pods)/(?P<uid>[^/]+)/volume-subpaths/(?P<name>[^/]+)/[^/]+/[0-9]+")


@attrs.frozen
class EmptyDir:
    """The emptyDir, or the part of one, that a mount shows.

    :ivar whole: the emptyDir. :ivar below: the path of what is mounted in it; "": all of it."""

    whole: Source
    below: str

    @property
    def name(self) -> str:
        """The name of the directory that the agent mounts."""
        return f"{self.whole.id}/{self.below}" if self.below else self.whole.id

    def has(self, path: str) -> bool:
        """Return whether a path of the node is in the emptyDir or where kubelet binds parts of it."""
        found = _WHOLE.fullmatch(self.whole.path)
        assert found is not None
        parts = f"{found['pods']}/{found['uid']}/volume-subpaths/{found['name']}"
        return any(path == top or path.startswith(f"{top}/") for top in (self.whole.path, parts))


def may_be_empty_dir(path: str, uid: str) -> bool:
    """Return whether `find_empty_dir` has to look."""
    found = _WHOLE.fullmatch(path) or _PART.fullmatch(path)
    return found is not None and found["uid"] == uid


def find_empty_dir(path: str, uid: str, table: MountTable) -> EmptyDir | None:
    """Find the emptyDir of the pod with this UID that a path without links is, or lies in. Blocks.

    None: the path is in none of them, or the emptyDir has something mounted in it.

    :raise InvalidArgument: the path is a part of an emptyDir, and that part can't be in a VM.
    :raise FailedPrecondition: it can't be looked at."""
    found = _WHOLE.fullmatch(path) or _PART.fullmatch(path)
    if found is None or not may_be_empty_dir(path, uid):
        return None
    inner = f"{uid}/volumes/kubernetes.io~empty-dir/{found['name']}"
    top = f"{found['pods']}/{inner}"
    layout = table.layout(top)
    if len(layout) != 1:
        return None
    if path != top and not _is_part(table.layout(path), layout):
        return None
    whole = find_source(cri.Mount(host_path=top), table)
    if whole.path != top or whole.file:
        return None
    own = layout[b""].path
    of_kubelet = own.endswith(b"/" + inner.encode())
    in_memory = bool(whole.size_limit or whole.huge_page_size)  # only kubelet's mounts have these
    if not of_kubelet and not (own == b"/" and in_memory):
        return None
    return EmptyDir(whole, _below(table.layout(path)[b""].path, own) if path != top else "")


def _is_part(part: Layout, whole: Layout) -> bool:
    own, top = part[b""], whole[b""]
    return own.device == top.device and (own.path + b"/").startswith(top.path.rstrip(b"/") + b"/")


def _below(path: bytes, top: bytes) -> str:
    below = path[len(top) :].strip(b"/")
    try:
        return check_path(below).decode()
    except (InvalidArgument, UnicodeDecodeError):
        raise InvalidArgument(
            f"subPath {below[:200]!r} of an emptyDir is no longer there, or can't be a path in a VM"
        ) from None
