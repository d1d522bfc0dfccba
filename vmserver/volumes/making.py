# SPDX-License-Identifier: Apache-2.0
"""The mark on a disk whose file system is being made: while it is there, the disk has no data.

mkfs writes many times, and the VM may end between any two writes. Then the disk is neither blank nor has a
file system. Therefore a blank disk is marked first, and the mark is removed once the file system is complete:

    mark    file system                           what it is
    none    none, and the disk is blank           new: mark it, make one
    there   none, or the one asked for, which     incomplete: make it again
            was certainly never mounted
    there   the one asked for, maybe mounted      complete: the mark was left, or is content of a file
    any     another one                           has data: refuse it
    none    none, and the disk is not blank       has data: refuse it

The mark is a block of 4 KiB about a MiB before the disk's end, where a blank disk has only zeros. If mkfs
writes there, the mark is gone, and what a killed mkfs leaves is refused as data. A program that may write
files could write a block like the mark, so the mark is ignored on a file system that may have been mounted.
Every function blocks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from infranetes_common.errors import DataLoss

_BLOCK = 4096
_FROM_END = (1 << 20) + _BLOCK  # before the last 128 KiB, which mkfs.xfs wipes
_SMALLEST = 8 << 20  # a smaller disk is not marked: the file system's tables take nearly all of it
_WORDS = b"Infranetes is making a file system on this disk, which was blank: "


def mark(device: str, serial: str) -> None:
    """Mark a blank disk, on the disk itself. A very small one is left without. :raise DataLoss: it can't be
    written."""
    _write(device, _block(serial))


def is_marked(device: str, serial: str) -> bool:
    """Return whether a disk is marked. :raise DataLoss: it can't be read."""
    with _opened(device, os.O_RDONLY) as (descriptor, place):
        return place is not None and os.pread(descriptor, _BLOCK, place) == _block(serial)


def unmark(device: str, serial: str) -> None:
    """Remove the mark, if there is one. :raise DataLoss: it can't be removed."""
    if is_marked(device, serial):
        _write(device, bytes(_BLOCK))


def _write(device: str, block: bytes) -> None:
    with _opened(device, os.O_RDWR) as (descriptor, place):
        if place is not None:
            os.pwrite(descriptor, block, place)
            os.fsync(descriptor)


def _block(serial: str) -> bytes:
    return (_WORDS + serial.encode()).ljust(_BLOCK, b"\0")


@contextmanager
def _opened(device: str, flags: int) -> Iterator[tuple[int, int | None]]:
    """Yield a disk's descriptor and its mark's place; None: it is too small for one."""
    try:
        descriptor = os.open(device, flags | os.O_CLOEXEC)
        try:
            size = os.lseek(descriptor, 0, os.SEEK_END)
            yield descriptor, (size - _FROM_END) // _BLOCK * _BLOCK if size >= _SMALLEST else None
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataLoss(f"{device} can't be read or written: {error.strerror}") from None
