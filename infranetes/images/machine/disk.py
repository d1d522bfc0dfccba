# SPDX-License-Identifier: Apache-2.0
"""A disk on the node that VMs boot copies of."""

from __future__ import annotations

import enum
from pathlib import Path

import attrs


class DiskFormat(enum.Enum):
    """The format of a disk's file, found out when it was brought to the node and never probed again."""

    RAW = "raw"
    QCOW2 = "qcow2"
    ISO = "iso"  # a bootable CD: read-only, and the VM gets an empty disk beside it


@attrs.frozen
class BaseDisk:
    """A disk on the node that VMs boot copies of. It is inspected, and nobody writes to it any more."""

    digest: str  # sha256: and 64 hex digits, of the file as the image has it
    path: Path  # whoever has it open may open it again by /proc/self/fd; others can't get at it
    format: DiskFormat
    virtual_size: int  # bytes
    # Which firmware can boot it, from its partition table; both False: that can't be told.
    boots_by_bios: bool = False
    boots_by_uefi: bool = False
    has_agent: bool = False  # whether its image says that our agent is in it
