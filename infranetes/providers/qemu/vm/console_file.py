# SPDX-License-Identifier: Apache-2.0
"""The file that QEMU appends a console to. A byte's number is its place in the file, for good.

What is no longer kept becomes a hole at the file's beginning, so that nothing is moved while QEMU writes, and
a later daemon finds by the hole where the kept bytes begin. Everything here blocks.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_BLOCK = 4096
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # fallocate(2)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate64.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def begin_of(path: Path) -> int:
    """Return the number of the first byte that is kept. :raise OSError: there is no such file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _begin(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path, offset: int, size: int) -> bytes | None:
    """Read up to `size` bytes; None: they are not kept, or beyond the end. :raise OSError: no such file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if offset > os.fstat(descriptor).st_size:
            return None
        data = os.pread(descriptor, size, offset)
        return data if offset >= _begin(descriptor) else None  # looked at last: they may have just gone
    finally:
        os.close(descriptor)


def forget(path: Path, most: int) -> None:
    """If more than `most` bytes are kept, keep the last half of `most` alone.

    :raise OSError: that can't be done here."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        about = os.fstat(descriptor)
        if about.st_size - _begin(descriptor) <= most:
            return
        block = max(_BLOCK, about.st_blksize)
        until = (about.st_size - most // 2) // block * block
        if until > 0 and _libc.fallocate64(descriptor, _PUNCH_HOLE | _KEEP_SIZE, 0, until) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(descriptor)


def _begin(descriptor: int) -> int:
    try:
        return os.lseek(descriptor, 0, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # it has no data
            return 0
        raise
