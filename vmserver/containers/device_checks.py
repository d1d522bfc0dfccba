# SPDX-License-Identifier: Apache-2.0
"""Checks of a container's devices that all providers make."""

from __future__ import annotations

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri


def permissions(device: cri.Device) -> str:
    """Return which of r, w and m are asked for. :raise InvalidArgument: something else is."""
    found = device.permissions or "rwm"
    if not set(found) <= set("rwm"):
        inside = device.container_path or device.host_path
        raise InvalidArgument(f"config.devices {inside[:200]!r}: permissions are some of r, w and m")
    return found


def missing(device: cri.Device) -> InvalidArgument:
    """Return the error for a device that the VM lacks."""
    return InvalidArgument(
        f"config.devices: the VM has no device {device.host_path[:200]!r}. Containers can have the VM's own "
        "devices, such as /dev/fuse, and disks (volumeMode: Block), but no device of the node's, nor one of "
        "a device plug-in"
    )
