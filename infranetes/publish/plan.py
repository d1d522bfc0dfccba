# SPDX-License-Identifier: Apache-2.0
"""The blocks of a disk that hold data, and their checksums."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from infranetes_common.errors import InvalidArgument

BLOCK = 512 * 1024
GIB = 1 << 30
_ZEROS = bytes(BLOCK)
_SECTOR = 512


@attrs.frozen
class DiskPlan:
    """A raw disk.

    :ivar digests: SHA-256 of each block that is not all zeros, by its number, in ascending order."""

    path: Path
    size: int
    digests: Mapping[int, bytes]

    @property
    def gib(self) -> int:
        """The disk's size in GiB, rounded up."""
        return -(-self.size // GIB)

    @property
    def data_bytes(self) -> int:
        """The bytes of blocks that hold anything."""
        return len(self.digests) * BLOCK

    @property
    def digest(self) -> str:
        """A digest of all that it holds."""
        found = hashlib.sha256(str(self.size).encode())
        for number, digest in self.digests.items():
            found.update(b"%d " % number + digest)
        return found.hexdigest()

    @property
    def linear_checksum(self) -> str:
        """EBS' LINEAR aggregation: the digest of the blocks' digests in ascending order, as base64."""
        return in_base64(hashlib.sha256(b"".join(self.digests.values())).digest())


def in_base64(digest: bytes) -> str:
    """Return a digest as HTTP's headers have it."""
    return base64.b64encode(digest).decode()


def scan(path: Path) -> DiskPlan:
    """Read a raw disk. Holes are not read.

    :raise InvalidArgument: it is not a raw disk.
    :raise OSError: it can't be read."""
    with path.open("rb", buffering=0) as file:
        number = file.fileno()
        size = os.fstat(number).st_size
        _check(path, size, os.pread(number, _SECTOR, 0))
        blocks = ((each, read_block(number, each)) for each in _with_data(number, size))
        return DiskPlan(
            path, size, {each: hashlib.sha256(data).digest() for each, data in blocks if data != _ZEROS}
        )


def read_block(number: int, block: int) -> bytes:
    """Return a block of an open disk, filled up with zeros at its end."""
    data = b""
    while len(data) < BLOCK:
        part = os.pread(number, BLOCK - len(data), block * BLOCK + len(data))
        if not part:
            break
        data += part
    return data.ljust(BLOCK, b"\0")


def _with_data(number: int, size: int) -> Iterator[int]:
    """Yield the blocks of a sparse file that are not all hole."""
    at, last = 0, -1
    while at < size:
        try:
            begin = os.lseek(number, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return
        at = os.lseek(number, begin, os.SEEK_HOLE)
        yield from range(max(begin // BLOCK, last + 1), -(-at // BLOCK))
        last = (at - 1) // BLOCK


def _check(path: Path, size: int, first: bytes) -> None:
    if not size or size % _SECTOR:
        raise InvalidArgument(f"{path} is no raw disk: it has {size} bytes, which are no whole sectors")
    if first[-2:] != b"\x55\xaa":
        raise InvalidArgument(
            f"{path} is no disk that a machine can boot: it has no partition table. A raw disk is expected; "
            f"`qemu-img convert -O raw` makes one of another format"
        )
