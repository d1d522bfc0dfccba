# SPDX-License-Identifier: Apache-2.0
"""The room of the file system that volumes are in. It is never given away twice: all of them can be filled.

Promised is what a volume does not have yet: its holes, and the blocks that it shares with a snapshot or
another volume, of which each takes new room when it is written to. What a snapshot has stays as it is.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from infranetes.providers.qemu.volumes import sparse_files
from infranetes_common.errors import OutOfRange, ResourceExhausted

UNIT = 1 << 20
MAX_SIZE = 1 << 46  # 64 TiB


class Room:
    """The free space, and the space reserved for files that are being made. All methods but `release` block,
    and no two of them may run at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._kept: dict[Path, int] = {}

    def free(self, volumes: Iterable[Path]) -> int:
        """Return the free bytes promised to nothing. :raise OSError: the directory can't be looked at."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = os.statvfs(self._directory)
        promised = sum(_lacking(path) for path in volumes)
        for path, size in (*self._kept.items(),):
            promised += max(0, size - _allocated(path))
        return min(MAX_SIZE, max(0, free.f_bavail * free.f_frsize - promised) // UNIT * UNIT)

    def keep(self, path: Path, size: int, volumes: Iterable[Path]) -> None:
        """Keep room for a file of `size` bytes in all, whether it exists yet or not, until it is released.

        :raise ResourceExhausted: there is none. :raise OSError: it can't be looked at."""
        kept = self._kept.get(path, 0)
        if size > kept:
            self.check(self.free(volumes), size - kept)
            self._kept[path] = size

    def release(self, path: Path) -> None:
        """Keep no more room for a file. Idempotent."""
        self._kept.pop(path, None)

    def check(self, free: int, needed: int) -> None:
        """Check that there is what is needed. :raise ResourceExhausted: there is less."""
        if needed > free:
            raise ResourceExhausted(
                f"{self._directory} has {free >> 20} MiB that are not reserved for volumes, and "
                f"{-(-needed // UNIT)} MiB are needed: delete volumes or snapshots, or give volumes_dir a "
                "larger file system"
            )


def check_size(size: int) -> None:
    """Check that a volume can be so large. :raise OutOfRange: it can't."""
    if not 0 < size <= MAX_SIZE or size % UNIT:
        raise OutOfRange(f"{size} bytes: a volume has 1 MiB to {MAX_SIZE >> 40} TiB, in whole MiB")


def _lacking(path: Path) -> int:
    """Return how many more bytes of space a volume may come to take."""
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        return 0
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        own = found.st_blocks * 512 - sparse_files.shared(descriptor)
    finally:
        os.close(descriptor)
    return max(0, found.st_size - max(0, own))


def _allocated(path: Path) -> int:
    try:
        return os.lstat(path).st_blocks * 512
    except FileNotFoundError:
        return 0
