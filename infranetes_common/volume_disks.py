# SPDX-License-Identifier: Apache-2.0
"""The identification of a pod's volume disks in its VM: the conventions that node and agent share."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

from infranetes_common.errors import InvalidArgument

TARGET = 2  # the virtio-scsi target of volumes' disks; images' layers are at lower targets
# The identifiers that disks of any IaaS report. `serial_of` makes one where the IaaS lets us choose.
SERIAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_AT_LUN = re.compile(r"(azure-lun-[0-9]{1,2})-[0-9a-f]{20}")
FILESYSTEMS = ("ext4", "xfs")
# Mount options, with their flags for mount(2); 0: an option of the file system. Source: linux/mount.h.
OPTIONS: Mapping[str, int] = {
    "ro": 1,
    "nosuid": 2,
    "nodev": 4,
    "noexec": 8,
    "sync": 16,
    "dirsync": 128,
    "noatime": 1024,
    "nodiratime": 2048,
    "relatime": 1 << 21,
    "lazytime": 1 << 25,
    "discard": 0,
}
# Options without effect: a mount's defaults.
_DEFAULTS = frozenset({"defaults", "rw", "suid", "dev", "exec", "async", "atime", "nodiscard"})


def checked_options(options: Iterable[str]) -> list[str]:
    """Return the options, each once, without mere defaults. :raise InvalidArgument: one is not allowed."""
    found = []
    for option in options:
        if option not in OPTIONS and option not in _DEFAULTS:
            allowed = ", ".join(sorted({*OPTIONS, *_DEFAULTS}))
            raise InvalidArgument(f"mount option {option[:80]!r} is not one of {allowed}")
        if option in OPTIONS and option not in found:
            found.append(option)
    return found


def serial_of(volume: str) -> str:
    """Return the serial number for a volume's disk, where we choose it: 20 characters fit every kind."""
    return hashlib.sha256(volume.encode()).hexdigest()[:20]


def serial_at_lun(lun: int, volume: str) -> str:
    """Return the serial number for a volume's disk in a VM of Azure's, where it has but a place in the VM.

    The volume keeps it apart from other disks that have had the place before."""
    return f"azure-lun-{lun}-{serial_of(volume)}"


def place_of(serial: str) -> str | None:
    """Return the place in a serial number that `serial_at_lun` has made; None: it is of another kind."""
    match = _AT_LUN.fullmatch(serial)
    return match[1] if match is not None else None
