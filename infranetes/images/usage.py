# SPDX-License-Identifier: Apache-2.0
"""The disk usage of the node's images."""

from __future__ import annotations

import os
import time
from pathlib import Path

import attrs


@attrs.frozen
class FsUsage:
    """The disk usage of the image store."""

    timestamp_nanos: int  # since 1970 UTC
    path: str
    used_bytes: int
    inodes_used: int


def of(directory: Path) -> FsUsage:
    """Add up everything below `directory`. Blocks."""
    used, inodes = 0, 0
    for parent, directories, files in os.walk(directory):
        for name in (*directories, *files):
            try:
                used += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except FileNotFoundError:
                continue
            inodes += 1
    return FsUsage(time.time_ns(), str(directory), used, inodes)
