# SPDX-License-Identifier: Apache-2.0
"""Layers' files: reading them uncompressed, and checking that they are what they are said to be.

Everything here blocks and is called in threads.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import threading
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import zstandard

from infranetes_common.errors import FailedPrecondition

CHUNK_BYTES = 256 * 1024
MAX_ZSTD_WINDOW = 128 << 20  # zstd's own default limit


_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_SKIPPABLE = b"\x2a\x4d\x18"  # after a byte from 0x50 to 0x5f: zstd passes over such a frame
_TAR_HEADER = 512  # bytes
_TAR_SUM_AT, _TAR_SUM = slice(148, 156), re.compile(rb"[ \0]*([0-7]+)[ \0]*")


def compression_of(path: Path, declared: str) -> str:
    """Return how a layer's file is compressed: gzip, zstd or "", by its first bytes.

    :param declared: what its manifest says, which counts where these bytes don't tell.
    """
    with open(path, "rb") as file:
        head = file.read(_TAR_HEADER)
    if head.startswith(_GZIP):
        return "gzip"
    if head.startswith(_ZSTD) or (head[1:4] == _SKIPPABLE and 0x50 <= head[0] <= 0x5F):
        return "zstd"
    return "" if _begins_tar(head) else declared


def _begins_tar(head: bytes) -> bool:
    """Whether this is the first header of a tar, or of one without files: zeros.

    Only the sum in it is common to all kinds of tars."""
    if len(head) < _TAR_HEADER:
        return False
    if not any(head):
        return True
    said = _TAR_SUM.fullmatch(head[_TAR_SUM_AT])
    summed = head[: _TAR_SUM_AT.start] + b" " * 8 + head[_TAR_SUM_AT.stop :]
    return said is not None and int(said[1], 8) == sum(summed)


def uncompressed(path: Path, compression: str) -> BinaryIO:
    """Open a layer's tar for reading."""
    if compression == "gzip":
        return cast(BinaryIO, gzip.open(path, "rb"))
    file = open(path, "rb")  # noqa: SIM115
    if compression == "zstd":
        reader = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW)
        return cast(BinaryIO, reader.stream_reader(file, read_across_frames=True, closefd=True))
    return file


def measure(path: Path, compression: str, limit: int, stop: threading.Event) -> tuple[str, int]:
    """Return digest and size of the uncompressed layer.

    :param stop: set by another thread when the result is no longer wanted.
    :raise FailedPrecondition: it unpacks to more than `limit` bytes, or is compressed in another way.
    """
    summed, size = hashlib.sha256(), 0
    try:
        with uncompressed(path, compression) as file:
            while not stop.is_set() and (chunk := file.read(CHUNK_BYTES)):
                size += len(chunk)
                if size > limit:
                    raise FailedPrecondition(
                        f"layer sha256:{path.name} unpacks to more than {limit} bytes "
                        "(images.max_layer_bytes)"
                    )
                summed.update(chunk)
    except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError, EOFError) as e:
        raise FailedPrecondition(
            f"layer sha256:{path.name} is not the {compression} file it is said to be: {e}"
        ) from None
    return f"sha256:{summed.hexdigest()}", size
