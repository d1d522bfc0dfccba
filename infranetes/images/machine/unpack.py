# SPDX-License-Identifier: Apache-2.0
"""A disk's file out of an image: found in its layers, decompressed, and written with holes for zeros."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from threading import Semaphore, Thread

import attrs

from infranetes.images.erofs import source, tar
from infranetes.images.erofs.limits import BadLayer, Limits, quoted
from infranetes.images.erofs.source import TarStream
from infranetes.images.erofs.tar import DIRECTORY, FILE, Entry
from infranetes.images.machine.decompress import CHUNK, decompressed
from infranetes.images.machine.formats import compression_of
from infranetes.images.machine.limits import BadDisk, DiskLimits

PLACE = b"disk"  # the directory in an image
_WHITEOUT, _OPAQUE = b".wh.", b".wh..wh..opq"
_HOLE = 64 * 1024  # bytes of zeros that become a hole
_ZEROS = bytes(CHUNK)
_TAR = Limits(max_bytes=1 << 50)  # of entries that are passed over; what is taken is bounded itself
_AHEAD = 4  # pieces that are summed later than they are written
_MARK_BYTES = 6  # of a file's beginning, by which its compression is known

Piece = bytes | memoryview | int
"""Of a file's content: data, or the length of a hole."""


@attrs.frozen
class Unpacked:
    """A disk's file that was written.

    :ivar name: in the image; "" if it has none. :ivar digest: of the file as the image has it.
    """

    name: str
    digest: str


@attrs.frozen
class TarLayer:
    """A layer's tar. :ivar descriptor: of its file. :ivar compression: gzip, zstd or ""."""

    descriptor: int
    compression: str


def from_layers(layers: Sequence[TarLayer], target: int, limits: DiskLimits) -> Unpacked:
    """Write the one disk that an image has in its /disk.

    A layer hides files of the layers below, by others of the same names or by whiteouts.

    :param layers: lowest first. :param target: an empty file that can be read and written.
    :raise BadDisk: there is none, more than one, or one that can't be used.
    """
    search = _Search(target, limits)
    for layer in reversed(layers):
        if search.covered:
            break
        try:
            search.look_into(layer)
        except BadLayer as error:
            raise BadDisk(f"one of its layers can't be read: {error}") from None
    if search.disk is None:
        raise BadDisk(
            "it has no disk: an image of a machine has exactly one file in /disk, a qcow2, raw or ISO one"
        )
    return search.disk


def from_file(descriptor: int, target: int, limits: DiskLimits) -> Unpacked:
    """Write the disk that a file is. :raise BadDisk: it can't be used."""
    return _written(_chunks(descriptor), "", target, limits)


def _chunks(descriptor: int) -> Iterator[bytes]:
    return iter(lambda: os.read(descriptor, CHUNK), b"")


class _Search:
    """The search for the disk, from the highest layer down.

    :ivar covered: no layer below has anything that is still seen."""

    def __init__(self, target: int, limits: DiskLimits) -> None:
        self.disk: Unpacked | None = None
        self.covered = False
        self._name = b""
        self._hidden: set[bytes] = set()
        self._target = target
        self._limits = limits

    def look_into(self, layer: TarLayer) -> None:
        """Look into the next layer. :raise BadDisk, BadLayer: something is wrong with it."""
        hides: set[bytes] = set()  # names in layers below, and not in this one
        chunks = source.chunks(layer.descriptor, layer.compression)
        with TarStream(chunks, self._limits.stored_bytes, summed=False) as stream:
            for entry in tar.entries(stream, _TAR):
                match [part for part in entry.path.split(b"/") if part not in (b"", b".")]:
                    case [b".wh.disk" | b".wh..wh..opq"] | [b"disk", b".wh..wh..opq"]:
                        self.covered = True
                    case [b"disk"] if entry.kind != DIRECTORY:
                        self.covered = True
                        if self.disk is not None:
                            continue
                        raise BadDisk("its /disk is no directory; put the disk's file into /disk/")
                    case [b"disk", name] if name.startswith(_WHITEOUT):
                        hides.add(name.removeprefix(_WHITEOUT))
                    case [b"disk", name]:
                        hides.add(name)
                        if entry.kind != DIRECTORY and name not in self._hidden:
                            self._take(entry, name, stream)
        self._hidden |= hides

    def _take(self, entry: Entry, name: bytes, stream: TarStream) -> None:
        if self.disk is not None and self._name != name:
            raise BadDisk(
                f"it has several disks, {quoted(self._name)} and {quoted(name)} among them; "
                "leave one file in /disk"
            )
        if entry.kind != FILE:
            raise BadDisk(
                f"its /disk/{quoted(name)[1:-1]} is no file but a link or device; put the file there"
            )
        if entry.size > self._limits.virtual_bytes:
            raise _too_long(self._limits)
        self._name = name
        self.disk = _written(entry.content(stream), quoted(name)[1:-1], self._target, self._limits)


def _written(pieces: Iterator[Piece], name: str, target: int, limits: DiskLimits) -> Unpacked:
    """Write a disk from its content, which may be compressed."""
    os.ftruncate(target, 0)
    with _Sum() as summed:
        content = _summed(pieces, summed)
        first: list[Piece] = []
        while sum(map(_length, first)) < _MARK_BYTES and (piece := next(content, None)) is not None:
            first.append(piece)
        compression = compression_of(b"".join(map(_beginning, first)))
        whole: Iterator[Piece] = itertools.chain(first, content)
        if compression:
            whole = decompressed(_without_holes(whole), compression)
        out = _Output(target, limits)
        for piece in whole:
            out.add(piece)
        out.finish()
        for _ in content:  # what follows the end of what is compressed counts for the digest
            pass
    return Unpacked(name, summed.digest)


class _Sum:
    """The digest of what passes, computed in a thread. A context manager: at its end it is known."""

    def __init__(self) -> None:
        self._summed = hashlib.sha256()
        self._queue: SimpleQueue[bytes | memoryview] = SimpleQueue()
        self._free = Semaphore(_AHEAD)
        self._thread = Thread(target=self._thd_sum, daemon=True)

    @property
    def digest(self) -> str:
        return f"sha256:{self._summed.hexdigest()}"

    def update(self, data: bytes | memoryview) -> None:
        self._free.acquire()
        self._queue.put(data)

    def __enter__(self) -> _Sum:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.put(b"")
        self._thread.join()

    def _thd_sum(self) -> None:
        while data := self._queue.get():
            self._summed.update(data)
            self._free.release()


def _too_long(limits: DiskLimits) -> BadDisk:
    return BadDisk(f"its file has more than {limits.virtual_bytes} bytes (images.max_disk_bytes)")


def _length(piece: Piece) -> int:
    return piece if isinstance(piece, int) else len(piece)


def _beginning(piece: Piece) -> bytes:
    return bytes(min(piece, _MARK_BYTES)) if isinstance(piece, int) else bytes(piece[:_MARK_BYTES])


def _summed(pieces: Iterator[Piece], summed: _Sum) -> Iterator[Piece]:
    for piece in pieces:
        for data in _without_holes(iter([piece])):
            summed.update(data)
        yield piece


def _without_holes(pieces: Iterator[Piece]) -> Iterator[bytes]:
    for piece in pieces:
        if isinstance(piece, int):
            for at in range(0, piece, CHUNK):
                yield _ZEROS[: piece - at]
        else:
            yield bytes(piece) if isinstance(piece, memoryview) else piece


class _Output:
    """The file, which grows from nothing."""

    def __init__(self, target: int, limits: DiskLimits) -> None:
        self._target = target
        self._limits = limits
        self._at = self._stored = 0

    def add(self, piece: Piece) -> None:
        """Write the next piece. :raise BadDisk: it is too much."""
        if isinstance(piece, int):
            self._at += piece
        else:
            view = memoryview(piece)
            for data in _runs(view, self._at):
                if isinstance(data, int):
                    self._at += data
                else:
                    self._store(data)
        if self._at > self._limits.virtual_bytes:
            raise _too_long(self._limits)

    def _store(self, data: memoryview) -> None:
        self._stored += len(data)
        if self._stored > self._limits.stored_bytes:
            raise BadDisk(
                f"its file has more than {self._limits.stored_bytes} bytes of data (images.max_layer_bytes)"
            )
        while data:
            written = os.pwrite(self._target, data, self._at)
            self._at += written
            data = data[written:]

    def finish(self) -> None:
        """Give the file its length, and have it on the disk."""
        os.ftruncate(self._target, self._at)
        os.fsync(self._target)


def _runs(data: memoryview, at: int) -> Iterator[memoryview | int]:
    """Split data that is to be at `at` into what has to be written, and holes."""
    begin = here = 0
    while here < len(data):
        count = min(_HOLE - (at + here) % _HOLE, len(data) - here)
        if data[here : here + count] == _ZEROS[:count]:
            if here > begin:
                yield data[begin:here]
            yield count
            begin = here + count
        here += count
    if here > begin:
        yield data[begin:]
