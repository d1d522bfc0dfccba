# SPDX-License-Identifier: Apache-2.0
"""The limits of a machine's disk, and the error for one that exceeds them or can't be used."""

from __future__ import annotations

from typing import Protocol

import attrs

from infranetes.images.erofs.limits import MIB

GIB = 1 << 30


class BadDisk(Exception):
    """The disk can't be used. The message says why and what to do, for people, without naming its image."""


@attrs.frozen
class DiskLimits:
    """The limits of one disk.

    :ivar virtual_bytes: that its VM may see (`images.max_disk_bytes`).
    :ivar stored_bytes: of its file's data on the node, holes left out (`images.max_layer_bytes`).
    :ivar memory_bytes: of the address space of what looks at it.
    :ivar seconds: that each of these programs may take.
    """

    virtual_bytes: int = 2048 * GIB
    stored_bytes: int = 64 * GIB
    memory_bytes: int = 2048 * MIB
    seconds: float = 1800.0


class Bounds(Protocol):
    """The bounds that the configuration has."""

    @property
    def max_disk_bytes(self) -> int: ...

    @property
    def max_layer_bytes(self) -> int: ...


def limits_of(bounds: Bounds) -> DiskLimits:
    """Return the limits by the configuration."""
    return DiskLimits(virtual_bytes=bounds.max_disk_bytes, stored_bytes=bounds.max_layer_bytes)
