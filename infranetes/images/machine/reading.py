# SPDX-License-Identifier: Apache-2.0
"""Disks as whoever looks into them reads them: bytes at places, whatever the format."""

from __future__ import annotations

import os
from typing import Protocol


class Readable(Protocol):
    """A disk, or a part of one. :ivar size: bytes that it has."""

    @property
    def size(self) -> int: ...

    def read(self, at: int, length: int) -> bytes:
        """Return the bytes at `at`; fewer, or none, where the disk ends. :raise BadDisk: it is corrupt."""


class RawFile:
    """A file that is a disk."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = os.lseek(descriptor, 0, os.SEEK_END)  # the worker may not ask for a status

    def read(self, at: int, length: int) -> bytes:
        content = b""
        while length > len(content) and (more := os.pread(self._descriptor, length - len(content), at)):
            content, at = content + more, at + len(more)
        return content


class Part:
    """A part of a disk. :param at: where it begins. :param size: its bytes, if the disk has them."""

    def __init__(self, disk: Readable, at: int, size: int) -> None:
        self._disk = disk
        self._at = min(at, disk.size)
        self.size = max(min(size, disk.size - self._at), 0)

    def read(self, at: int, length: int) -> bytes:
        return self._disk.read(self._at + at, max(min(length, self.size - at), 0)) if at >= 0 else b""
