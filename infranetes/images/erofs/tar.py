# SPDX-License-Identifier: Apache-2.0
"""A tar's entries, from an untrusted stream.

It reads what Go's archive/tar does, which containerd and Docker use: the formats ustar, PAX and GNU. As they
do, global PAX headers are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import attrs

from infranetes.images.erofs import sparse
from infranetes.images.erofs.limits import BadLayer, Limits, quoted
from infranetes.images.erofs.source import TarStream
from infranetes.images.erofs.sparse import Extents

BLOCK = 512
FILE, LINK, SYMLINK, CHAR, BLOCK_DEVICE, DIRECTORY, FIFO = b"0", b"1", b"2", b"3", b"4", b"5", b"6"
_SPARSE = b"S"  # GNU's own form of sparse files
_KINDS = frozenset((FILE, LINK, SYMLINK, CHAR, BLOCK_DEVICE, DIRECTORY, FIFO))
_PAX, _GLOBAL_PAX, _LONG_NAME, _LONG_TARGET = b"x", b"g", b"L", b"K"
_AS_FILE = (b"\0", b"7")  # old forms of FILE
_ZEROS = bytes(BLOCK)
_OCTAL = re.compile(rb"[ \0]*([0-7]*) *(?:\0.*)?", re.DOTALL)
# Mode, uid, gid, size and mtime, as nearly all tars write them.
_USUAL = re.compile(rb"([0-7]{7})\0([0-7]{7})\0([0-7]{7})\0([0-7]{11})[ \0]([0-7]{11})[ \0]")
_DECIMAL = re.compile(rb"[0-9]{1,20}")
_TIME = re.compile(rb"(-?)([0-9]{1,18})(?:\.([0-9]*))?")
_XATTR = b"SCHILY.xattr."
_MAX_ID = (1 << 32) - 2  # chown(2) takes the next one, -1, to mean "unchanged"
_NANO = 1_000_000_000


@attrs.define
class Entry:
    """An entry of the tar.

    :ivar size: of a regular file.
    :ivar stored: how many bytes follow in the stream, whatever their meaning.
    :ivar extents: where these belong in a sparse file.
    """

    kind: bytes
    path: bytes
    target: bytes
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    major: int
    minor: int
    xattrs: dict[bytes, bytes]
    stored: int
    extents: Extents | None = None

    def content(self, source: TarStream) -> Iterator[memoryview | int]:
        """Yield a regular file's data, and the lengths of its holes."""
        if self.extents is None:
            return source.pieces(self.size)
        return sparse.pieces(source, self.extents, self.size)


@attrs.define
class _Extra:
    """The facts about an entry from the headers before its own."""

    pax: dict[bytes, bytes] = attrs.field(factory=dict)
    name: bytes = b""
    target: bytes = b""
    used: bool = False


def entries(source: TarStream, limits: Limits) -> Iterator[Entry]:
    """Yield the entries. Who takes one reads as much of its data as it likes before it takes the next.

    :raise BadLayer: the stream is not a tar, or has more than the limits allow.
    """
    extra, count = _Extra(), 0
    while header := _header(source):
        count += 1
        if count > 2 * limits.entries:  # a name may need a header of its own
            raise BadLayer(
                f"its tar has more than {2 * limits.entries} headers; split it into several layers"
            )
        kind, numbers = header[156:157], _numbers(header)
        if kind in (_PAX, _GLOBAL_PAX, _LONG_NAME, _LONG_TARGET):
            data = _extra_data(source, kind, numbers[3], limits)
            extra.used = True
            if kind == _PAX:
                extra.pax = _pax(data)
            elif kind == _LONG_NAME:
                extra.name = data.partition(b"\0")[0]
            elif kind == _LONG_TARGET:
                extra.target = data.partition(b"\0")[0]
            continue
        entry = _entry(header, numbers, extra, limits)
        gnu = sparse.old_map(source, header) if kind == _SPARSE else None
        end = source.offset + entry.stored + -entry.stored % BLOCK
        if gnu is not None or (entry.kind == FILE and sparse.is_sparse(extra.pax)):
            entry.extents, entry.size = gnu or sparse.pax_map(source, extra.pax)
            data_end = end - -entry.stored % BLOCK
            sparse.check(entry.extents, entry.size, data_end - source.offset)
            _check(entry, limits)
        yield entry
        source.skip(end - source.offset)
        if extra.used:
            extra = _Extra()


def _header(source: TarStream) -> bytes:
    """Return the next header, or nothing at the archive's end."""
    header = source.take(BLOCK)
    if header == _ZEROS and (header := source.take(BLOCK)) == _ZEROS:
        return b""
    if not header:
        return b""
    if len(header) < BLOCK:
        raise BadLayer("its tar is cut off")
    match = _OCTAL.fullmatch(header, 148, 156)
    said = int(match[1] or b"0", 8) if match else -1
    counted = sum(header) - sum(header[148:156]) + 8 * 32
    # Some old programs summed signed bytes.
    if said != counted and said != counted - 256 * sum(b > 127 for b in header[:148] + header[156:]):
        raise BadLayer(f"its tar has no header at byte {source.offset - BLOCK}")
    return header


def _extra_data(source: TarStream, kind: bytes, size: int, limits: Limits) -> bytes:
    limit = limits.header_bytes if kind in (_PAX, _GLOBAL_PAX) else limits.path_bytes + 1
    if not 0 <= size <= limit:
        raise BadLayer(
            f"its tar has a header of {size} bytes at byte {source.offset - BLOCK}; up to {limit} are read"
        )
    data = b"".join(source.pieces(size))
    source.skip(-size % BLOCK)
    return data


def _number(header: bytes, at: int, length: int, what: str) -> int:
    """Read a field: octal digits, or a binary number if its first bit is set."""
    first = header[at]
    if not first & 0x80:
        match = _OCTAL.fullmatch(header, at, at + length)
        if match is None:
            raise BadLayer(f"its tar has a malformed {what}: {quoted(header[at : at + length])}")
        return int(match[1] or b"0", 8)
    if first & 0x40:
        return int.from_bytes(header[at : at + length], "big", signed=True)
    return int.from_bytes(header[at : at + length], "big") - (1 << (8 * length - 1))


def _numbers(header: bytes) -> tuple[int, int, int, int, int]:
    """Return mode, uid, gid, size and mtime."""
    match = _USUAL.fullmatch(header, 100, 148)
    if match is not None:
        mode, uid, gid, size, mtime = match.groups()
        return int(mode, 8), int(uid, 8), int(gid, 8), int(size, 8), int(mtime, 8)
    return (
        _number(header, 100, 8, "mode"),
        _number(header, 108, 8, "uid"),
        _number(header, 116, 8, "gid"),
        _number(header, 124, 12, "size"),
        _number(header, 136, 12, "time"),
    )


def _pax(data: bytes) -> dict[bytes, bytes]:
    """Read a PAX header's records: length, space, key=value, newline."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        space = data.find(b" ", at, at + 9)
        length = data[at : max(space, at)]
        end = at + int(length) if length.isdigit() else 0
        key, equals, value = data[space + 1 : max(end - 1, 0)].partition(b"=")
        if not space < end <= len(data) or data[end - 1 : end] != b"\n" or not equals or not key:
            raise BadLayer("its tar has a malformed PAX header")
        found[key] = value
        at = end
    return found


def _entry(header: bytes, numbers: tuple[int, int, int, int, int], extra: _Extra, limits: Limits) -> Entry:
    pax, kind = extra.pax, header[156:157]
    mode, uid, gid, size, mtime = numbers
    mtime *= _NANO
    path = extra.name or pax.get(b"GNU.sparse.name") or pax.get(b"path") or _name(header)
    if pax:
        uid, gid, size = (_decimal(pax, k, v) for k, v in ((b"uid", uid), (b"gid", gid), (b"size", size)))
        mtime = _mtime(pax, mtime)
    if kind in _AS_FILE or kind == FILE:
        kind = DIRECTORY if path.endswith(b"/") else FILE
    elif kind == _SPARSE:
        kind = FILE
    else:
        size = 0  # whatever the header says
    if kind not in _KINDS:
        what = f"of an unknown type {quoted(kind)}"
        raise BadLayer(f"its entry {quoted(path)} is {what}; make the image with another program")
    target = b""
    if kind in (LINK, SYMLINK):
        target = extra.target or pax.get(b"linkpath") or _string(header, 157, 100)
    major = minor = 0
    if kind in (CHAR, BLOCK_DEVICE):
        major, minor = _number(header, 329, 8, "device"), _number(header, 337, 8, "device")
    xattrs = _xattrs(pax) if pax else {}
    entry = Entry(kind, path, target, mode & 0o7777, uid, gid, size, mtime, major, minor, xattrs, size)
    _check(entry, limits)
    return entry


def _check(entry: Entry, limits: Limits) -> None:
    """Check what a file system can't have, or what is above the limits."""
    wrong = ""
    if len(entry.path) > limits.path_bytes or len(entry.target) > limits.path_bytes:
        wrong = f"its name or target has over {limits.path_bytes} bytes"
    elif b"\0" in entry.path or b"\0" in entry.target:
        wrong = "its name or target has a zero byte"
    elif not (0 <= entry.uid <= _MAX_ID and 0 <= entry.gid <= _MAX_ID):
        wrong = f"it belongs to user {entry.uid} and group {entry.gid}, which is not valid"
    elif not 0 <= entry.size <= limits.max_bytes or not 0 <= entry.stored <= limits.max_bytes:
        wrong = f"it has {entry.size} bytes; the limit is {limits.max_bytes} (images.max_layer_bytes)"
    elif not (0 <= entry.major < 1 << 12 and 0 <= entry.minor < 1 << 20):
        wrong = f"it is device {entry.major}:{entry.minor}, which is not valid"
    elif not -(1 << 63) <= entry.mtime_ns // _NANO < 1 << 63:
        wrong = "its time is out of range"
    if wrong:
        raise BadLayer(f"its entry {quoted(entry.path)} can't be made: {wrong}")


def _string(header: bytes, at: int, length: int) -> bytes:
    return header[at : at + length].partition(b"\0")[0]


def _name(header: bytes) -> bytes:
    name = _string(header, 0, 100)
    if header[257:263] != b"ustar\0":  # GNU's format has times in place of the prefix
        return name
    prefix = _string(header, 345, 131 if header[508:512] == b"tar\0" else 155)
    return prefix + b"/" + name if prefix else name


def _decimal(pax: dict[bytes, bytes], key: bytes, otherwise: int) -> int:
    value = pax.get(key)
    if not value:
        return otherwise
    if _DECIMAL.fullmatch(value) is None:
        raise BadLayer(f"its tar has a malformed {key.decode()}: {quoted(value)}")
    return int(value)


def _mtime(pax: dict[bytes, bytes], otherwise: int) -> int:
    """Return nanoseconds since 1970."""
    value = pax.get(b"mtime")
    if not value:
        return otherwise
    match = _TIME.fullmatch(value)
    if match is None:
        raise BadLayer(f"its tar has a malformed time: {quoted(value)}")
    sign, seconds, fraction = match.groups()
    nanos = int(seconds) * _NANO + int((fraction or b"")[:9].ljust(9, b"0"))
    return -nanos if sign else nanos


def _xattrs(pax: dict[bytes, bytes]) -> dict[bytes, bytes]:
    return {key[len(_XATTR) :]: value for key, value in pax.items() if key.startswith(_XATTR)}
