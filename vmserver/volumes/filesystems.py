# SPDX-License-Identifier: Apache-2.0
"""The file systems of disks: what a disk holds, how one is made on it, grown, and given to a group.

Functions block if their docstring says so.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator

import attrs

from infranetes_common.commands import Command, run
from infranetes_common.errors import (
    DataLoss,
    FailedPrecondition,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.reactors import IReactor

MAKE_SECONDS = 300.0
GROW_SECONDS = 300.0
# Bytes at each end of a disk. blkid looks at no others: LUKS2 may begin at 4 MiB.
_ENDS = 5 << 20
_CHUNK = 1 << 20
_ZEROS = bytes(_CHUNK)
_NOTHING_FOUND = 2  # blkid's exit code
_SLACK = 1 << 20  # bytes of a disk that a file system may leave unused

_MAKE = {
    # Reserve no blocks for root, which a volume does not need. Write tables and journal when they are needed,
    # so that an empty volume takes no room. Discard nothing, since the disk is all zeros.
    "ext4": ("mkfs.ext4", "-q", "-F", "-m", "0",
             "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard"),
    "xfs": ("mkfs.xfs", "-q", "-K"),
}  # fmt: skip
_MAGIC = {"ext4": (1024 + 0x38, b"\x53\xef"), "xfs": (0, b"XFSB")}
_MOUNTED_AT = 1024 + 0x2C  # in ext4's superblock: the time of the last mount for writing
_IN_PROGRESS = 126  # in xfs's superblock: not 0 until mkfs has ended
# A volume and its copy have the same UUID. Without nouuid, xfs would mount only one of them.
_DATA = {"ext4": "errors=remount-ro", "xfs": "nouuid"}


@attrs.frozen
class Space:
    """The space in a file system: bytes, and inodes. `available` is the part for users other than root."""

    total: int
    available: int
    used: int
    inodes: int
    free_inodes: int


def options_of(filesystem: str, options: list[str]) -> str:
    """Return the options that the file system itself is mounted with."""
    return ",".join(filter(None, [_DATA[filesystem], *(one for one in options if one == "discard")]))


def size_of(device: str) -> int:
    """Return the size of a disk in bytes. Blocks. :raise Unavailable: it can't be read."""
    try:
        descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.lseek(descriptor, 0, os.SEEK_END)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise Unavailable(f"{device} can't be read: {error.strerror}") from None


def flush(device: str) -> None:
    """Flush everything written to a disk. Blocks. :raise DataLoss: it can't be written."""
    try:
        descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataLoss(f"what was written to {device} can't be synced to the disk: {error}") from None


def is_blank(device: str) -> bool:
    """Return whether a disk begins and ends with zeros only. Blocks. :raise DataLoss: it can't be read."""
    try:
        descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.lseek(descriptor, 0, os.SEEK_END)
            return size > 0 and all(_ZEROS.startswith(piece) for piece in _pieces(descriptor, size))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataLoss(f"{device} can't be read: {error.strerror}") from None


def _pieces(descriptor: int, size: int) -> Iterator[bytes]:
    for begin in (0, max(0, size - _ENDS)):
        for offset in range(begin, min(size, begin + _ENDS), _CHUNK):
            yield os.pread(descriptor, _CHUNK, offset)


def begins_as(device: str, filesystem: str) -> bool:
    """Return whether a disk has this file system's magic. Blocks. :raise DataLoss: it can't be read."""
    offset, magic = _MAGIC[filesystem]
    try:
        descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, len(magic), offset) == magic
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataLoss(f"{device} can't be read: {error.strerror}") from None


def is_unused(device: str, filesystem: str) -> bool:
    """Return whether a disk with this file system was certainly never mounted for writing. Blocks.

    :param filesystem: the one whose magic it has. :raise DataLoss: it can't be read."""
    try:
        descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        try:
            head = os.pread(descriptor, 4096, 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataLoss(f"{device} can't be read: {error.strerror}") from None
    if filesystem == "xfs":
        return head[_IN_PROGRESS] != 0
    return head[_MOUNTED_AT : _MOUNTED_AT + 4] == bytes(4)


async def found_on(reactor: IReactor, device: str) -> str:
    """Return blkid's name for the content of a disk; "" if blkid recognizes nothing.

    :raise FailedPrecondition: it holds signatures of several things."""
    command = ["blkid", "-p", "-o", "value", "-s", "TYPE", "-s", "PTTYPE", device]
    output = await run(reactor, Command(command, 30.0))
    if output.code == _NOTHING_FOUND:
        return ""
    if output.code != 0:
        raise FailedPrecondition(
            f"{device} holds something ambiguous (blkid: {output.code}, {output.message()[:200]}): wipe "
            "it if nothing of it is needed"
        )
    return " ".join(output.stdout.decode(errors="replace").split())


async def make(reactor: IReactor, device: str, filesystem: str, *, again: bool = False) -> None:
    """Make a file system on a disk.

    :param again: over one that was half made. :raise FailedPrecondition: it can't be made: the disk is too
        small."""
    force = ["-f"] if again and filesystem == "xfs" else []  # mkfs.ext4 overwrites one in any case
    output = await run(reactor, Command([*_MAKE[filesystem], *force, device], MAKE_SECONDS))
    if output.code != 0:
        raise FailedPrecondition(f"{filesystem} can't be made on the volume: {output.message()[:400]}")


async def grow(reactor: IReactor, device: str, filesystem: str, point: str) -> None:
    """Make a mounted file system as large as its disk. :raise ResourceExhausted: it can't be."""
    command = ["resize2fs", device] if filesystem == "ext4" else ["xfs_growfs", "-d", point]
    output = await run(reactor, Command(command, GROW_SECONDS))
    if output.code != 0:
        raise ResourceExhausted(f"the file system of {device} can't be grown: {output.message()[:400]}")


def is_smaller(device: str, filesystem: str) -> bool:
    """Return whether a file system can grow on its disk. Blocks. :raise DataLoss: it can't be read."""
    try:
        descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.lseek(descriptor, 0, os.SEEK_END)
            return _extent(filesystem, os.pread(descriptor, 4096, 0)) + _SLACK <= size
        finally:
            os.close(descriptor)
    except (OSError, struct.error) as error:
        raise DataLoss(f"{device} can't be read: {error}") from None


def _extent(filesystem: str, head: bytes) -> int:
    """Return the size that a file system was made for, by its superblock."""
    if filesystem == "xfs":
        block, blocks = struct.unpack_from(">4xIQ", head)
        return int(block) * int(blocks)
    low, exponent = struct.unpack_from("<I16xI", head, 1024 + 4)
    (high,) = struct.unpack_from("<I", head, 1024 + 0x150)
    return (int(high) << 32 | int(low)) * (1024 << int(exponent))


def space(point: str) -> Space:
    """Return the space in a mounted file system. Blocks. :raise Unavailable: it can't be measured."""
    try:
        found = os.statvfs(point)
    except OSError as error:
        raise Unavailable(f"{point} can't be measured: {error.strerror}") from None
    unit = found.f_frsize
    return Space(
        total=found.f_blocks * unit,
        available=found.f_bavail * unit,
        used=(found.f_blocks - found.f_bfree) * unit,
        inodes=found.f_files,
        free_inodes=found.f_ffree,
    )


def give_to_group(top: str, group: int) -> None:
    """Give all files to a group that may read and write them, as kubelet does for an fsGroup. The top is
    changed last; if it is the group's already, nothing happens. Blocks.

    :raise FailedPrecondition: the files can't be changed."""
    try:
        found = os.stat(top)
        if found.st_gid == group and found.st_mode & 0o2070 == 0o2070:
            return
        for _, _, files, directory in os.fwalk(top, topdown=False, follow_symlinks=False):
            for name in files:
                about = os.stat(name, dir_fd=directory, follow_symlinks=False)
                os.chown(name, -1, group, dir_fd=directory, follow_symlinks=False)
                if stat.S_ISREG(about.st_mode):
                    os.chmod(name, stat.S_IMODE(about.st_mode) | 0o660, dir_fd=directory)
            os.fchown(directory, -1, group)
            os.fchmod(directory, stat.S_IMODE(os.fstat(directory).st_mode) | 0o2770)
    except OSError as error:
        raise FailedPrecondition(f"{top} can't be given to group {group}: {error}") from None
