# SPDX-License-Identifier: Apache-2.0
"""The control groups that kubelet names for pods, such as `/kubepods/pod1` and `kubepods-pod1.slice`."""

from __future__ import annotations

from pathlib import PurePosixPath

from infranetes_common.errors import InvalidArgument

SLICE = ".slice"
_LONGEST = 3840  # bytes of a path: the kernel's 4096, without a mount point and the VM's own group
_LONGEST_NAME = 255  # bytes; see limits.h


def group_path(parent: str) -> PurePosixPath:
    """Return a parent as kubelet names it, below each mount. :raise InvalidArgument: it can't be one."""
    path = PurePosixPath(parent.lstrip("/"))
    if not parent.isprintable() or ".." in path.parts or not path.parts or _is_too_long(path):
        raise InvalidArgument(f"cgroup_parent {parent[:80]!r} is no path of a control group")
    return path


def is_slice(parent: str) -> bool:
    """Return whether a pod's parent group is systemd's, as with kubelet's cgroup driver `systemd`."""
    return parent.endswith(SLICE)


def slice_path(parent: str) -> PurePosixPath:
    """Return the path, below each mount, of the slice that is named last in `parent`.

    >>> slice_path("kubepods-burstable.slice")
    PurePosixPath('kubepods.slice/kubepods-burstable.slice')

    :raise InvalidArgument: it can't be one.
    """
    return _slice(group_path(parent).name)


def _slice(name: str) -> PurePosixPath:
    words = name.removesuffix(SLICE).split("-")
    return PurePosixPath(*("-".join(words[: end + 1]) + SLICE for end in range(len(words))))


def _is_too_long(path: PurePosixPath) -> bool:
    """Whether the kernel has no such path, or none of the directory where systemd keeps such a slice."""
    if len(bytes(path)) > _LONGEST or any(len(part.encode()) > _LONGEST_NAME for part in path.parts):
        return True
    return is_slice(path.name) and len(bytes(_slice(path.name))) > _LONGEST
