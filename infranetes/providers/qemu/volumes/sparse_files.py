# SPDX-License-Identifier: Apache-2.0
"""Copies of large files: blocks that two files share, where the file system can do that, or data alone.

A file system whose files can share blocks (xfs, btrfs) holds back all writes to a file while it is cloned, so
a clone is of one instant even if the file is being written to. The more pieces the file is in, the longer a
clone takes.

Everything here blocks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from threading import Event

_FICLONE = 0x40049409
_FIEMAP = 0xC020660B
_FIEMAP_HEAD = struct.Struct("=QQIIII")  # start, length, flags, mapped extents, room for extents, reserved
_FIEMAP_EXTENT = struct.Struct("=QQQQQIIII")  # logical, physical, length, 2 reserved, flags, 3 reserved
_EXTENTS = 512  # in one request
_LAST = 0x1
_SHARED = 0x2000
_CHUNK = 8 << 20
# Errors which mean that this file system, or these two files, can't share blocks.
_NO_CLONE = frozenset((errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS))


class Cancelled(Exception):
    """The end of a copy that nobody wants any more."""


def clone(source: int, target: int) -> bool:
    """Make a file an independent copy of another that shares its blocks; False: that is not possible here."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in _NO_CLONE:
            return False
        raise
    return True


def copy(source: int, target: int, cancelled: Event) -> None:
    """Copy what a file holds to an empty one, which becomes as large; holes stay holes.

    :raise Cancelled: `cancelled` was set meanwhile. :raise OSError: the target may hold part of it.
    """
    size = os.fstat(source).st_size
    os.ftruncate(target, size)
    for start, end in data(source, size):
        while start < end:
            if cancelled.is_set():
                raise Cancelled
            count = os.copy_file_range(source, target, min(_CHUNK, end - start), start, start)
            if not count:  # the file has been made smaller meanwhile
                raise OSError(errno.EIO, "the file ends before its end")
            start += count


def shared(descriptor: int) -> int:
    """Return how many bytes of a file are in blocks shared with another file, where writes take new space."""
    found = start = 0
    while True:
        extents = _extents(descriptor, start)
        for logical, length, flags in extents:
            if flags & _SHARED:
                found += length
            start = logical + length
        if not extents or extents[-1][2] & _LAST:
            return found


def data(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a file that have data: the start and the end of each."""
    end = 0
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # there is no data from there on
                return
            raise
        end = min(size, os.lseek(descriptor, start, os.SEEK_HOLE))
        yield start, end


def _extents(descriptor: int, start: int) -> list[tuple[int, int, int]]:
    """Some extents of a file from an offset on: where each begins, its length and flags."""
    request = bytearray(_FIEMAP_HEAD.size + _EXTENTS * _FIEMAP_EXTENT.size)
    _FIEMAP_HEAD.pack_into(request, 0, start, (1 << 64) - 1 - start, 0, 0, _EXTENTS, 0)
    try:
        fcntl.ioctl(descriptor, _FIEMAP, request)
    except OSError as error:
        # A file system without this call shares no blocks.
        if error.errno in (errno.EOPNOTSUPP, errno.ENOTTY):
            return []
        raise
    mapped = _FIEMAP_HEAD.unpack_from(request)[3]
    whole = memoryview(request)[_FIEMAP_HEAD.size : _FIEMAP_HEAD.size + mapped * _FIEMAP_EXTENT.size]
    return [(each[0], each[2], each[5]) for each in _FIEMAP_EXTENT.iter_unpack(whole)]
