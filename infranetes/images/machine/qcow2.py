# SPDX-License-Identifier: Apache-2.0
"""qcow2 as a stranger made it: its header is checked before QEMU sees it, and its data is read.

Source: QEMU's docs/interop/qcow2.txt. A disk that is checked names no other file, so nothing that opens it
opens another. `qemu-img check` looks at the rest, such as its reference counts.
"""

from __future__ import annotations

import struct
import zlib

import attrs
import zstandard

from infranetes.images.machine.formats import QCOW2
from infranetes.images.machine.limits import BadDisk
from infranetes.images.machine.reading import Readable

_HEADER = struct.Struct(">4sIQIIQIIQQIIQ")  # what versions 2 and 3 have
_VERSION_3 = struct.Struct(">QQQII")  # what follows there
_CORRUPT, _DATA_FILE, _COMPRESSION, _EXTENDED = 1 << 1, 1 << 2, 1 << 3, 1 << 4
_KNOWN = 1 | _CORRUPT | _DATA_FILE | _COMPRESSION | _EXTENDED  # the lowest: reference counts may be old
_NAMES_DATA_FILE, _ENCRYPTION, _BITMAPS = 0x44415441, 0x0537BE77, 0x23852875
_OFFSET = 0x00FFFFFFFFFFFE00
_ALL_ZERO, _COMPRESSED = 1, 1 << 62
_MAX_TABLE = 32 << 20  # bytes of a first-level table or reference table, as in QEMU
_MAX_SNAPSHOTS, _SNAPSHOT_BYTES = 65536, 40
_MAX_BITMAPS, _MAX_BITMAP_DIRECTORY = 65535, 64 << 20
_CACHED = 64  # tables of the second level, and decompressed clusters, that are kept


@attrs.frozen
class _Header:
    """The parts of a header that are used."""

    cluster_bits: int
    size: int
    l1_size: int
    l1_at: int
    extended: bool
    zstd: bool

    @property
    def cluster(self) -> int:
        return 1 << self.cluster_bits

    @property
    def entry_bytes(self) -> int:
        return 16 if self.extended else 8


class Qcow2:
    """A disk in a qcow2 file.

    :param file: the file's bytes.
    :raise BadDisk: it is malformed, or is not the whole disk: it names other files, or is encrypted.
    """

    def __init__(self, file: Readable) -> None:
        self._file = file
        self._header = _read_header(file)
        self.size = self._header.size
        self._l1 = _whole(file, self._header.l1_at, 8 * self._header.l1_size, "first-level table")
        self._tables: dict[int, bytes] = {}
        self._clusters: dict[int, bytes] = {}

    def read(self, at: int, length: int) -> bytes:
        """Return the bytes at `at`; fewer where the disk ends. :raise BadDisk: a table is corrupt."""
        pieces = []
        end = min(at + length, self.size)
        while at < end:
            inside = at % self._header.cluster
            count = min(self._header.cluster - inside, end - at)
            pieces.append(self._piece(at - inside, inside, count))
            at += count
        return b"".join(pieces)

    def _piece(self, cluster_at: int, inside: int, count: int) -> bytes:
        header = self._header
        per_table = header.cluster // header.entry_bytes
        number = cluster_at >> header.cluster_bits
        first = int.from_bytes(self._l1[8 * (number // per_table) :][:8], "big") & _OFFSET
        if not first:
            return bytes(count)
        at = number % per_table * header.entry_bytes
        table = self._table(first)
        entry = int.from_bytes(table[at : at + 8], "big")
        if entry & _COMPRESSED:
            return self._decompressed(entry)[inside : inside + count]
        data_at = entry & _OFFSET
        if header.extended:
            return self._subclusters(table[at + 8 : at + 16], data_at, inside, count)
        if not data_at or entry & _ALL_ZERO:
            return bytes(count)
        return self._data(data_at + inside, count)

    def _subclusters(self, bitmap: bytes, data_at: int, inside: int, count: int) -> bytes:
        """Return a part of a cluster of 32 pieces, each of which has data or not."""
        # The other half tells zeros from what a backing file has.
        allocated = int.from_bytes(bitmap[4:], "big")
        size = self._header.cluster // 32
        content = b""
        while count > len(content):
            at = inside + len(content)
            some = min(size - at % size, count - len(content))
            has_data = data_at and allocated >> (at // size) & 1
            content += self._data(data_at + at, some) if has_data else bytes(some)
        return content

    def _data(self, at: int, count: int) -> bytes:
        content = self._file.read(at, count)
        return content + bytes(count - len(content))  # a file's last cluster may be cut off where zeros begin

    def _table(self, at: int) -> bytes:
        if at not in self._tables:
            if len(self._tables) >= _CACHED:
                self._tables.clear()
            self._tables[at] = _whole(self._file, at, self._header.cluster, "second-level table")
        return self._tables[at]

    def _decompressed(self, entry: int) -> bytes:
        if entry not in self._clusters:
            if len(self._clusters) >= _CACHED:
                self._clusters.clear()
            self._clusters[entry] = self._decompress(entry)
        return self._clusters[entry]

    def _decompress(self, entry: int) -> bytes:
        bits = 62 - (self._header.cluster_bits - 8)
        at = entry & ((1 << bits) - 1)
        sectors = (entry >> bits & ((1 << (self._header.cluster_bits - 8)) - 1)) + 1
        data = self._file.read(at, 512 * sectors - at % 512)
        cluster = self._header.cluster
        try:
            if self._header.zstd:
                with zstandard.ZstdDecompressor().stream_reader(data) as reader:
                    content = reader.read(cluster)
            else:
                content = zlib.decompressobj(-15).decompress(data, cluster)  # no more: it may be a bomb
        except (zlib.error, zstandard.ZstdError) as error:
            raise BadDisk(f"its compressed cluster at byte {at} is corrupt: {error}") from None
        if len(content) != cluster:
            raise BadDisk(f"its compressed cluster at byte {at} is cut off")
        return content


def _read_header(file: Readable) -> _Header:
    """Read and check a header. :raise BadDisk: see `Qcow2`."""
    data = file.read(0, _HEADER.size + _VERSION_3.size + 8)
    if len(data) < _HEADER.size + _VERSION_3.size:
        raise BadDisk("its qcow2 header is cut off: the file is truncated")
    (magic, version, backing_at, backing_size, cluster_bits, size, encryption, l1_size, l1_at, counts_at,
     count_clusters, snapshots, snapshots_at) = _HEADER.unpack_from(data)  # fmt: skip
    if magic != QCOW2 or version not in (2, 3):
        raise BadDisk(f"it is qcow version {version}; convert it by `qemu-img convert -f qcow -O qcow2`")
    if backing_at or backing_size:
        raise BadDisk(
            "it has a backing file, which is not in the image; make it whole by "
            "`qemu-img convert -O qcow2 FILE WHOLE.qcow2`"
        )
    if encryption:
        raise BadDisk("it is encrypted, and nobody could give the key; convert it to one that is not")
    if not 9 <= cluster_bits <= 21:
        raise BadDisk(f"its clusters have 2^{cluster_bits} bytes; 2^9 to 2^21 are possible")
    flags, length = 0, _HEADER.size
    zstd = False
    if version == 3:
        flags, _, _, _, length = _VERSION_3.unpack_from(data, _HEADER.size)
        if flags & ~_KNOWN:
            raise BadDisk(f"it has features that are not known here ({flags & ~_KNOWN:#x})")
        if flags & _CORRUPT:
            raise BadDisk("it is marked as corrupt; repair it by `qemu-img check -r all`")
        if flags & _DATA_FILE:
            raise _names_data_file()
        if not _HEADER.size + _VERSION_3.size <= length <= 1 << cluster_bits or length % 8:
            raise BadDisk(f"its header says that it has {length} bytes")
        kind = data[_HEADER.size + _VERSION_3.size] if flags & _COMPRESSION else 0
        if kind > 1:
            raise BadDisk(f"its clusters are compressed in a way ({kind}) that is not known here")
        zstd = kind == 1
    header = _Header(cluster_bits, size, l1_size, l1_at, bool(flags & _EXTENDED), zstd)
    _check_extensions(file, length, header.cluster)
    covered = header.cluster // header.entry_bytes * header.cluster
    if -(-size // covered) > l1_size:
        raise BadDisk("its first-level table does not cover the disk")
    for what, at, count in (
        ("first-level table", l1_at, 8 * l1_size),
        ("table of reference counts", counts_at, count_clusters * header.cluster),
        ("table of snapshots", snapshots_at, _SNAPSHOT_BYTES * snapshots),
    ):
        if count and (at > file.size or at + count > file.size + header.cluster or count > _MAX_TABLE):
            raise BadDisk(f"its {what} is out of range: the file is truncated or corrupt")
    if snapshots > _MAX_SNAPSHOTS:
        raise BadDisk(f"it has {snapshots} snapshots")
    return header


def _check_extensions(file: Readable, at: int, end: int) -> None:
    """Check what follows the header, up to `end`. :raise BadDisk: see `Qcow2`."""
    while at + 8 <= end:
        kind, length = struct.unpack(">II", _whole(file, at, 8, "header"))
        if not kind:
            return
        if length > end - at - 8:
            raise BadDisk("an extension of its header is out of range")
        if kind == _NAMES_DATA_FILE:
            raise _names_data_file()
        if kind == _ENCRYPTION:
            raise BadDisk("it is encrypted, and nobody could give the key; convert it to one that is not")
        if kind == _BITMAPS:
            data = _whole(file, at + 8, 24, "header")
            count, _, size, directory_at = struct.unpack(">IIQQ", data)
            if count > _MAX_BITMAPS or size > _MAX_BITMAP_DIRECTORY or directory_at + size > file.size:
                raise BadDisk("its table of bitmaps is out of range")
        at += 8 + length + -length % 8


def _names_data_file() -> BadDisk:
    return BadDisk(
        "its data is in another file, which is not in the image; make it whole by "
        "`qemu-img convert -O qcow2 FILE WHOLE.qcow2`"
    )


def _whole(file: Readable, at: int, length: int, what: str) -> bytes:
    content = file.read(at, length) if at + length <= file.size else b""
    if len(content) != length:
        raise BadDisk(f"its {what} at byte {at} is out of range: the file is truncated or corrupt")
    return content
