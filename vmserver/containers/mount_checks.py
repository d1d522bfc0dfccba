# SPDX-License-Identifier: Apache-2.0
"""Checks of a container's mounts that all providers make."""

from __future__ import annotations

import posixpath
from collections.abc import Callable

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri


def field(mount: cri.Mount) -> str:
    """Return the name of a mount for error messages."""
    return f"config.mounts {mount.container_path[:200]!r}"


def target(mount: cri.Mount) -> str:
    """Return the normalized path in the container.

    :raise InvalidArgument: it is not an absolute path below /."""
    path = posixpath.normpath(mount.container_path)
    if not path.startswith("/") or path == "/" or "\0" in mount.container_path + mount.host_path:
        raise InvalidArgument(f"{field(mount)}: container_path has to be an absolute path below /")
    return path


def source(mount: cri.Mount, exists: Callable[[str], bool]) -> str:
    """Return the path in the VM. :raise InvalidArgument: the VM does not have it."""
    if not mount.host_path.startswith("/") or not exists(mount.host_path):
        raise InvalidArgument(f"{field(mount)}: the node has not sent {mount.host_path[:200]!r} to the VM")
    return mount.host_path
