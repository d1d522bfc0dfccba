# SPDX-License-Identifier: Apache-2.0
"""How a VM knows the disks of its pod's volumes: what node and agent have to agree on."""

from __future__ import annotations

import hashlib
import re

TARGET = 2  # of the virtio-scsi host, where volumes are: layers of images are below
SERIAL = re.compile(r"[0-9a-f]{20}")  # as many characters as every kind of disk can have


def serial_of(volume: str) -> str:
    """The serial number of a volume's disk."""
    return hashlib.sha256(volume.encode()).hexdigest()[:20]
