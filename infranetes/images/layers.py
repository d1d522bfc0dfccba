"""Layers as files: opened uncompressed, measured, and told apart from what they pretend to be.

Everything here blocks and is called in threads.
"""

from __future__ import annotations

import gzip
import hashlib
import threading
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

import zstandard

from infranetes_common.errors import FailedPrecondition

CHUNK_BYTES = 256 * 1024
MAX_ZSTD_WINDOW = 128 << 20  # what zstd itself takes without being asked for more


def uncompressed(path: Path, compression: str) -> BinaryIO:
    """The layer's tar, to be read from its beginning."""
    if compression == "gzip":
        return cast(BinaryIO, gzip.open(path, "rb"))
    file = open(path, "rb")  # noqa: SIM115
    if compression == "zstd":
        reader: Any = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW)
        return cast(BinaryIO, reader.stream_reader(file, read_across_frames=True, closefd=True))
    return file


def measure(path: Path, compression: str, limit: int, stop: threading.Event) -> tuple[str, int]:
    """Digest and size of the uncompressed layer.

    :param stop: set by another thread: the result is not wanted any more.
    :raise FailedPrecondition: it unpacks to more than `limit` bytes, or is no such file.
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
