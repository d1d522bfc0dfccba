# SPDX-License-Identifier: Apache-2.0
"""The control groups that kubelet names for pods, such as `/kubepods/pod1` and `kubepods-pod1.slice`."""

from __future__ import annotations

from pathlib import PurePosixPath

from infranetes_common.errors import InvalidArgument

_LONGEST = 4096  # bytes of a path; see limits.h


def group_path(parent: str) -> PurePosixPath:
    """Return a parent as kubelet names it, below each mount. :raise InvalidArgument: it can't be one."""
    path = PurePosixPath(parent.lstrip("/"))
    if not parent.isprintable() or ".." in path.parts or not path.parts or len(parent.encode()) > _LONGEST:
        raise InvalidArgument(f"cgroup_parent {parent[:80]!r} is no path of a control group")
    return path
