# SPDX-License-Identifier: Apache-2.0
"""Compressed disks as streams of their content, in pieces whose size a stranger can't choose."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Iterator

import zstandard

from infranetes.images.machine.limits import BadDisk

CHUNK = 1 << 20
_XZ_MEMORY = 512 << 20
_ZSTD_WINDOW = 128 << 20  # zstd's own default limit
_ZSTD_INPUT = 4096  # bytes at a time: all of them together may become 128 MiB


def decompressed(data: Iterator[bytes], compression: str) -> Iterator[bytes]:
    """Yield the content of a file in pieces.

    :param compression: gzip, xz or zstd.
    :raise BadDisk: it is corrupt, or cut off.
    """
    streams = {"gzip": _gunzipped, "xz": _unxz, "zstd": _unzstd}
    try:
        yield from streams[compression](data)
    except (zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
        raise BadDisk(f"it is not the {compression} file that it begins as: {error}") from None
    except EOFError:
        raise BadDisk(f"it is a {compression} file that is cut off") from None


def _gunzipped(data: Iterator[bytes]) -> Iterator[bytes]:
    member, whole = zlib.decompressobj(31), False
    for piece in data:
        left = piece
        while left:
            if whole:  # another member may follow, or zeros that fill a block
                left = left.lstrip(b"\0")
                if not left:
                    break
                member, whole = zlib.decompressobj(31), False
            content = member.decompress(left, CHUNK)
            whole = member.eof
            left = member.unused_data if whole else member.unconsumed_tail
            if content:
                yield content
    while not whole and (content := member.decompress(b"", CHUNK)):
        yield content
        whole = member.eof
    if not (whole or member.eof):
        raise EOFError


def _unxz(data: Iterator[bytes]) -> Iterator[bytes]:
    stream = _xz_stream()
    for piece in data:
        left = piece
        while left or not (stream.eof or stream.needs_input):
            if stream.eof:
                left = left.lstrip(b"\0")  # streams may be padded
                if not left:
                    break
                stream = _xz_stream()
            content = stream.decompress(left, CHUNK)
            left = stream.unused_data if stream.eof else b""
            if content:
                yield content
    if not stream.eof:
        raise EOFError


def _xz_stream() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)


def _unzstd(data: Iterator[bytes]) -> Iterator[bytes]:
    reader = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    frame = reader.decompressobj()
    for piece in data:
        for at in range(0, len(piece), _ZSTD_INPUT):
            left = piece[at : at + _ZSTD_INPUT]
            while left:
                if frame.eof:
                    frame = reader.decompressobj()
                content = frame.decompress(left)
                left = frame.unused_data if frame.eof else b""
                for start in range(0, len(content), CHUNK):
                    yield content[start : start + CHUNK]
    if not frame.eof:
        raise EOFError
