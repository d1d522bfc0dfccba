# SPDX-License-Identifier: Apache-2.0
"""A layer's tar as a stream of bytes: read, uncompressed and summed in threads, taken in pieces."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import IO, cast

import zstandard

from infranetes.images.erofs.limits import BadLayer

CHUNK = 1 << 20
_AHEAD = 4  # chunks that are read before they are asked for
_INPUT = 64 * 1024
_MAX_ZSTD_WINDOW = 128 << 20  # zstd's own default limit


def chunks(descriptor: int, compression: str) -> Iterator[bytes]:
    """Yield a file's uncompressed content in chunks of about 1 MiB.

    :param compression: gzip, zstd or nothing.
    :raise BadLayer: it is compressed in another way, or cut off.
    """
    if compression == "gzip":
        return _gunzipped(descriptor)
    if compression == "zstd":
        return _unzstd(descriptor)
    return iter(lambda: os.read(descriptor, CHUNK), b"")


def _gunzipped(descriptor: int) -> Iterator[bytes]:
    member, begun, data = zlib.decompressobj(31), False, b""
    while data or (data := os.read(descriptor, _INPUT)):
        if not begun and not (data := data.lstrip(b"\0")):
            continue  # files may be padded with zeros
        begun = True
        try:
            chunk = member.decompress(data, CHUNK)
        except zlib.error as e:
            raise BadLayer(f"it is not the gzip file it is said to be: {e}") from None
        data = member.unused_data if member.eof else member.unconsumed_tail
        if member.eof:  # another member may follow
            member, begun = zlib.decompressobj(31), False
        if chunk:
            yield chunk
    while begun and (chunk := member.decompress(b"", CHUNK)):
        yield chunk
    if begun and not member.eof:
        raise BadLayer("it is a gzip file that is cut off")


class _Raw:
    """A descriptor as a file that can only be read: Python's own files ask for more than the child may."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, size: int) -> bytes:
        return os.read(self._descriptor, size)


def _unzstd(descriptor: int) -> Iterator[bytes]:
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW)
    raw = cast(IO[bytes], _Raw(descriptor))  # only its `read` is used
    with decompressor.stream_reader(raw, read_size=_INPUT, read_across_frames=True) as reader:
        try:
            while chunk := reader.read(CHUNK):
                yield chunk
        except zstandard.ZstdError as e:
            raise BadLayer(f"it is not the zstd file it is said to be: {e}") from None


class TarStream:
    """The stream, with threads of its own that read, uncompress and sum ahead of who takes from it.

    A context manager: at its end the threads have ended.

    :ivar offset: how many bytes were taken. :param summed: False where nobody asks for the digest.
    """

    def __init__(self, stream: Iterator[bytes], max_bytes: int, *, summed: bool = True) -> None:
        self.offset = 0
        self._chunk = memoryview(b"")
        self._max = max_bytes
        self._total = 0
        self._sha = hashlib.sha256()
        self._free = Semaphore(_AHEAD)
        self._read: SimpleQueue[bytes | BaseException] = SimpleQueue()
        self._to_sum: SimpleQueue[bytes] = SimpleQueue()
        self._stopped = False
        self._summed = summed
        self._summing = Thread(target=self._thd_sum, daemon=True)
        self._reading = Thread(target=self._thd_read, args=(stream,), daemon=True)
        self._summing.start()
        self._reading.start()

    def __enter__(self) -> TarStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._free.release()
        self._reading.join()
        self._summing.join()

    def _thd_read(self, stream: Iterator[bytes]) -> None:
        try:
            for chunk in stream:
                self._free.acquire()
                if self._stopped:
                    break
                if self._summed:
                    self._to_sum.put(chunk)
                self._read.put(chunk)
            self._read.put(b"")
        except BaseException as e:
            self._read.put(e)
        self._to_sum.put(b"")

    def _thd_sum(self) -> None:
        while chunk := self._to_sum.get():
            self._sha.update(chunk)

    def _next(self) -> bool:
        """Have a chunk that something is left of. Returns False at the end."""
        got = self._read.get()
        if isinstance(got, BaseException):
            raise got
        if not got:
            self._read.put(got)  # later calls find the end, too
            return False
        self._free.release()
        self._total += len(got)
        if self._total > self._max:
            raise BadLayer(f"it unpacks to more than {self._max} bytes (images.max_layer_bytes)")
        self._chunk = memoryview(got)
        return True

    def take(self, size: int) -> bytes:
        """Return the next bytes; fewer at the end."""
        if len(self._chunk) >= size:
            taken = bytes(self._chunk[:size])
            self._chunk = self._chunk[size:]
            self.offset += size
            return taken
        return b"".join(self.pieces(size, exact=False))

    def pieces(self, size: int, *, exact: bool = True) -> Iterator[memoryview]:
        """Yield the next bytes, as they come.

        :raise BadLayer: the stream ends before.
        """
        while size:
            if not self._chunk and not self._next():
                if exact:
                    raise BadLayer("its tar is cut off")
                return
            piece = self._chunk[:size]
            self._chunk = self._chunk[len(piece) :]
            self.offset += len(piece)
            size -= len(piece)
            yield piece

    def skip(self, size: int) -> None:
        """Pass over bytes."""
        for _ in self.pieces(size):
            pass

    def finish(self) -> str:
        """Take all that is left; return the digest of the whole."""
        while self._next():
            pass
        self._chunk = memoryview(b"")
        self._summing.join()
        return f"sha256:{self._sha.hexdigest()}"
