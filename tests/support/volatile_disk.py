# SPDX-License-Identifier: Apache-2.0
"""A plug-in of nbdkit: a disk with a cache that loses its content with the power. The worst kind of disk.

Written data goes to the file `volatile`; a flush copies it to the file `stable`. So once this process is
killed, `stable` has everything that was flushed, and nothing that was written later unless a flush was under
way. Requests come one at a time (nbdkit's default for Python). Zeros are written like any other data.

Source: nbdkit-python-plugin(3), version 2 of its interface.
"""

from __future__ import annotations

import os

API_VERSION = 2
_BLOCK = 4096

_files: dict[str, int] = {}
_unflushed: set[int] = set()


def config(key: str, path: str) -> None:
    """Open a file. :param key: `stable`, `volatile`, or `flushes`, which gets a byte for each flush."""
    _files[key] = os.open(path, os.O_RDWR | os.O_CLOEXEC)


def open(readonly: bool) -> object:
    """Return the handle that nbdkit passes to the other functions."""
    return _files


def get_size(disk: object) -> int:
    """Return the disk's size in bytes."""
    return os.fstat(_files["volatile"]).st_size


def pread(disk: object, into: memoryview, offset: int, flags: int) -> None:
    """Read from the disk into a buffer."""
    os.preadv(_files["volatile"], [into], offset)


def pwrite(disk: object, data: memoryview, offset: int, flags: int) -> None:
    """Write to the cache only, until there is a flush."""
    os.pwrite(_files["volatile"], data, offset)
    _unflushed.update(range(offset // _BLOCK, -(-(offset + len(data)) // _BLOCK)))


def flush(disk: object, flags: int) -> None:
    """Make everything that was written stable."""
    for block in sorted(_unflushed):
        data = os.pread(_files["volatile"], _BLOCK, block * _BLOCK)
        os.pwrite(_files["stable"], data, block * _BLOCK)
    _unflushed.clear()
    os.write(_files["flushes"], b"f")
