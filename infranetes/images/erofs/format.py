# SPDX-License-Identifier: Apache-2.0
"""The structures of erofs that an uncompressed image needs; see fs/erofs/erofs_fs.h in Linux.

An inode's number is its place: 32-byte slots after the block where the metadata begins. Only what Linux 5.4
understands is used, so there are no incompatible features.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterable, Mapping, Sequence

BLOCK = 4096
BLOCK_BITS = 12
SLOT = 32
SUPER_OFFSET = 1024
INODE = 64  # bytes; always the extended form, which has times, large sizes and 32-bit ids
MAX_BLOCKS = 1 << 32
MAX_NAME = 255
MAX_XATTR_VALUE = 0xFFFF

PLAIN, INLINE = 0, 2  # where data is: in blocks of its own, or right after its inode
_MAGIC = 0xE0F5E1E2
_HAS_CHECKSUM, _HAS_MTIME = 1, 2

_SUPER = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQ24x")
_INODE = struct.Struct("<HHHHQIIIIqII16x")
_DIRENT = struct.Struct("<QHBB")
_XATTR = struct.Struct("<BBH")
_XATTR_HEADER = bytes(12)  # no filter, no shared attributes

_TYPES = {
    stat.S_IFREG: 1,
    stat.S_IFDIR: 2,
    stat.S_IFCHR: 3,
    stat.S_IFBLK: 4,
    stat.S_IFIFO: 5,
    stat.S_IFSOCK: 6,
    stat.S_IFLNK: 7,
}
#: The prefixes of attributes' names, which erofs writes as a number. Attributes with others can't be kept.
_PREFIXES = (
    (b"user.", 1),
    (b"system.posix_acl_access", 2),
    (b"system.posix_acl_default", 3),
    (b"trusted.", 4),
    (b"security.", 6),
)


def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


def crc32c(data: bytes) -> int:
    """Return the checksum as erofs has it: seeded with ones, not inverted at the end."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc


def super_block(*, root: int, inodes: int, blocks: int, meta_block: int, uuid: bytes) -> bytes:
    """Return the image's first block.

    :param root: the root's number, at most 65535. :param meta_block: where the metadata begins.
    """

    def packed(checksum: int) -> bytes:
        head = (_MAGIC, checksum, _HAS_CHECKSUM | _HAS_MTIME, BLOCK_BITS, 0, root, inodes)
        places = (0, 0, blocks, meta_block, 0, uuid, bytes(16))
        return _SUPER.pack(*head, *places, 0, 0, 0, 0, 0, 0, 0, 0).ljust(BLOCK - SUPER_OFFSET, b"\0")

    return bytes(SUPER_OFFSET) + packed(crc32c(packed(0)))


def inode(
    *,
    number: int,
    layout: int,
    mode: int,
    size: int,
    place: int,
    uid: int,
    gid: int,
    mtime_ns: int,
    nlink: int,
    xattr_bytes: int,
) -> bytes:
    """Return an inode.

    :param number: shown to programs of 32 bits.
    :param place: the first block of its data, or the device that it is.
    :param xattr_bytes: the length of `xattrs`, which follow it.
    """
    seconds, nanos = divmod(mtime_ns, 1_000_000_000)
    count = 1 + (xattr_bytes - len(_XATTR_HEADER)) // 4 if xattr_bytes else 0
    number &= 0xFFFFFFFF
    return _INODE.pack(1 | layout << 1, count, mode, 0, size, place, number, uid, gid, seconds, nanos, nlink)


def device(major: int, minor: int) -> int:
    """Return a device's number. :param major: 12 bits. :param minor: 20 bits."""
    return (minor & 0xFF) | (major << 8) | ((minor & ~0xFF) << 12)


def can_keep(name: bytes) -> bool:
    """Tell whether an extended attribute can have this name."""
    prefix, number = _prefix(name)
    rest = len(name) - len(prefix)
    return bool(number) and (rest == 0 if number in (2, 3) else 0 < rest <= MAX_NAME)


def _prefix(name: bytes) -> tuple[bytes, int]:
    return next(((prefix, number) for prefix, number in _PREFIXES if name.startswith(prefix)), (b"", 0))


def xattrs(attributes: Mapping[bytes, bytes]) -> bytes:
    """Return extended attributes as they follow an inode. Each name is one that `can_keep` allows."""
    if not attributes:
        return b""
    parts = [_XATTR_HEADER]
    for name in sorted(attributes):
        prefix, number = _prefix(name)
        value, rest = attributes[name], name[len(prefix) :]
        entry = _XATTR.pack(len(rest), number, len(value)) + rest + value
        parts.append(entry + bytes(-len(entry) % 4))
    return b"".join(parts)


def directory_blocks(names: Iterable[bytes]) -> tuple[list[list[bytes]], int]:
    """Divide a directory's sorted names into blocks; return these and the directory's size."""
    blocks: list[list[bytes]] = []
    used = BLOCK + 1
    for name in names:
        needed = _DIRENT.size + len(name)
        if used + needed > BLOCK:
            blocks.append([])
            used = 0
        blocks[-1].append(name)
        used += needed
    return blocks, (len(blocks) - 1) * BLOCK + used


def directory_block(entries: Sequence[tuple[bytes, int, int]]) -> bytes:
    """Return one block of a directory, not padded. :param entries: name, inode's number and mode."""
    heads, at = [], len(entries) * _DIRENT.size
    for name, number, mode in entries:
        heads.append(_DIRENT.pack(number, at, _TYPES[stat.S_IFMT(mode)], 0))
        at += len(name)
    return b"".join(heads) + b"".join(entry[0] for entry in entries)


# What `below` reads of an image that this program has made.


def read_super_block(block: bytes) -> tuple[int, int]:
    """Return the root's number, and the block where the metadata begins."""
    fields = _SUPER.unpack_from(block, SUPER_OFFSET)
    return fields[5], fields[10]


def read_inode(data: bytes) -> tuple[int, int, int, int, int, int, int, bool]:
    """Return mode, size, place, uid, gid, time, the length of `xattrs`, and whether data follows those."""
    form, count, mode, _, size, place, _, uid, gid, seconds, nanos, _ = _INODE.unpack(data)
    own = len(_XATTR_HEADER) + 4 * (count - 1) if count else 0
    return mode, size, place, uid, gid, seconds * 1_000_000_000 + nanos, own, form >> 1 == INLINE


def read_xattrs(data: bytes) -> dict[bytes, bytes]:
    """Return what `xattrs` has packed."""
    prefixes = {number: prefix for prefix, number in _PREFIXES}
    attributes, at = {}, len(_XATTR_HEADER)
    while at < len(data):
        rest, number, size = _XATTR.unpack_from(data, at)
        at += _XATTR.size
        attributes[prefixes[number] + data[at : at + rest]] = data[at + rest : at + rest + size]
        at += rest + size + -(_XATTR.size + rest + size) % 4
    return attributes


def read_directory_block(data: bytes) -> list[tuple[bytes, int]]:
    """Return the names in a directory's block, with their inodes' numbers."""
    count = _DIRENT.unpack_from(data)[1] // _DIRENT.size
    heads = [_DIRENT.unpack_from(data, index * _DIRENT.size) for index in range(count)]
    ends = [*(head[1] for head in heads[1:]), len(data)]
    return [(data[head[1] : end].rstrip(b"\0"), head[0]) for head, end in zip(heads, ends, strict=True)]
