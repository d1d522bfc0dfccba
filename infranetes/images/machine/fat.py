# SPDX-License-Identifier: Apache-2.0
"""The names in one directory of a FAT file system, as little of it as tells which UEFI firmware boots it."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from infranetes.images.machine.reading import Readable

_SUBDIRECTORY, _VOLUME, _LONG_NAME = 0x10, 0x08, 0x0F
_ENTRY = 32
_MAX_CLUSTERS = 1024  # of one directory, which may be a circle
_MAX_DIRECTORY = 1 << 20  # bytes


class Fat:
    """A FAT12, FAT16 or FAT32 file system. :raise ValueError: it is none."""

    def __init__(self, disk: Readable) -> None:
        self._disk = disk
        boot = disk.read(0, 512)
        if len(boot) < 512 or boot[510:] != b"\x55\xaa":
            raise ValueError("no FAT file system")
        sector, per_cluster, reserved, fats, in_root, sectors_16 = struct.unpack_from("<HBHBHH", boot, 11)
        per_fat_16, sectors_32 = struct.unpack_from("<H", boot, 22)[0], struct.unpack_from("<I", boot, 32)[0]
        per_fat_32, root = struct.unpack_from("<I", boot, 36)[0], struct.unpack_from("<I", boot, 44)[0]
        if sector not in (512, 1024, 2048, 4096) or per_cluster not in (1, 2, 4, 8, 16, 32, 64, 128):
            raise ValueError("no FAT file system")
        if not (reserved and 1 <= fats <= 2):
            raise ValueError("no FAT file system")
        per_fat = per_fat_16 or per_fat_32
        self._fat_at = reserved * sector
        self._root_at = (reserved + fats * per_fat) * sector
        self._root_bytes = in_root * _ENTRY
        self._data_at = self._root_at + -(-self._root_bytes // sector) * sector
        self._cluster = per_cluster * sector
        clusters = ((sectors_16 or sectors_32) * sector - self._data_at) // self._cluster
        self._bits = 12 if clusters < 4085 else 16 if clusters < 65525 else 32
        self._root = root if self._bits == 32 else 0

    def names(self, path: Sequence[str]) -> list[str]:
        """Return the short names in a directory, such as BOOTX64.EFI; none if there is no such directory."""
        content = self._chain(self._root) if self._root else self._disk.read(self._root_at, self._root_bytes)
        for name in path:
            below = next((first for its, first, inner in _entries(content) if inner and its == name), 0)
            if not below:
                return []
            content = self._chain(below)
        return [name for name, _, _ in _entries(content)]

    def _chain(self, cluster: int) -> bytes:
        content = b""
        for _ in range(_MAX_CLUSTERS):
            if cluster < 2 or cluster >= (1 << min(self._bits, 28)) - 16 or len(content) >= _MAX_DIRECTORY:
                break
            content += self._disk.read(self._data_at + (cluster - 2) * self._cluster, self._cluster)
            cluster = self._next(cluster)
        return content

    def _next(self, cluster: int) -> int:
        at = self._fat_at + cluster * self._bits // 8
        value = int.from_bytes(self._disk.read(at, 4 if self._bits == 32 else 2), "little")
        if self._bits == 12:
            return value >> 4 if cluster & 1 else value & 0xFFF
        return value & 0x0FFFFFFF


def _entries(content: bytes) -> Iterator[tuple[str, int, bool]]:
    """Yield the name, the first cluster, and whether it is a directory, of each entry."""
    for at in range(0, len(content) - _ENTRY + 1, _ENTRY):
        entry = content[at : at + _ENTRY]
        if not entry[0]:
            return
        kind = entry[11]
        if entry[0] == 0xE5 or kind == _LONG_NAME or kind & _VOLUME:
            continue
        stem, suffix = (part.decode("latin-1").rstrip(" ").upper() for part in (entry[:8], entry[8:11]))
        high, low = struct.unpack_from("<H4xH", entry, 20)
        yield f"{stem}.{suffix}" if suffix else stem, high << 16 | low, bool(kind & _SUBDIRECTORY)
