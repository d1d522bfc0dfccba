# SPDX-License-Identifier: Apache-2.0
"""Small sparse disks to publish."""

from __future__ import annotations

from pathlib import Path

from infranetes.publish.plan import BLOCK

BOOT_RECORD = bytes(510) + b"\x55\xaa"


def make(path: Path, blocks: dict[int, bytes], size: int = 1 << 30) -> Path:
    """Make a sparse disk with a boot record, and with the content of `blocks` at these block numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)
        file.write(BOOT_RECORD)
        for number, content in blocks.items():
            file.seek(number * BLOCK)
            file.write(content)
    return path
