# SPDX-License-Identifier: Apache-2.0
"""Make a disk of the guest image in use, whose agent finds its identity in QEMU. It needs root."""

from __future__ import annotations

from pathlib import Path

from infranetes.guest.cloud_disk import build_cloud_disk
from tests.guests import catalogue
from tests.guests.debian import said

_GIB = 2


def make(family: str, work: Path, target: Path) -> None:
    """Make the one disk in `target`."""
    raw = work / "disk.raw"
    build_cloud_disk("qemu", "machine", raw, _GIB, lambda words: None, image_dir=catalogue.guest_images())
    said("qemu-img", "convert", "-q", "-c", "-O", "qcow2", str(raw), str(target / f"{family}.qcow2"))
