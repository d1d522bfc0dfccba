"""An image as `docker load` takes it (source: moby image/tarexport, and Docker's image spec v1.2).

The tar has `manifest.json`, the configuration and the layers. Sizes are known before the first byte
is read, so it is a stream. Every name in it is ours. gzip layers stay as they are; zstd ones, which
Docker 20.10 can't read, leave uncompressed.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO, Any

from infranetes.images.index import Record
from infranetes.images.layers import CHUNK_BYTES, uncompressed
from infranetes_common.errors import Unavailable

BLOCK = tarfile.BLOCKSIZE

# Calls a function that blocks in a thread.
InThread = Callable[..., Any]


async def stream(record: Record, blobs: Path, present: int, in_thread: InThread) -> AsyncIterator[bytes]:
    """The tar in pieces of at most 256 KiB; the lowest `present` layers are named but not in it.

    :raise Unavailable: a blob changed or went away under it.
    """
    config_name = f"{record.id.removeprefix('sha256:')}.json"
    names = [f"{i:03d}.tar" for i in range(len(record.manifest.layers))]
    manifest = json.dumps([{"Config": config_name, "RepoTags": None, "Layers": names}]).encode()
    yield _header("manifest.json", len(manifest)) + manifest + _padding(len(manifest))
    files = [(config_name, record.manifest.config_digest, "", record.manifest.config_size)]
    for name, layer, unpacked in list(zip(names, record.manifest.layers, record.unpacked, strict=True))[
        present:
    ]:
        plain = layer.compression == "zstd"
        files.append((name, layer.digest, "zstd" if plain else "", unpacked if plain else layer.size))
    for name, digest, compression, size in files:
        yield _header(name, size)
        pieces = _content(blobs / digest.removeprefix("sha256:"), compression, size, in_thread)
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()
        if size % BLOCK:
            yield _padding(size)
    yield bytes(2 * BLOCK)


async def _content(path: Path, compression: str, size: int, in_thread: InThread) -> Any:
    """Exactly `size` bytes. Each piece is read in a thread: from a cold or busy disk it takes long."""
    try:
        file: IO[bytes] = await in_thread(uncompressed, path, compression)
    except OSError as e:
        raise Unavailable(
            f"blob sha256:{path.name} can't be read: {e.strerror}; pull the image again"
        ) from None
    try:
        left = size
        while left:
            piece = await in_thread(file.read, min(CHUNK_BYTES, left))
            if not piece:
                raise Unavailable(f"blob sha256:{path.name} is {left} bytes short; pull the image again")
            left -= len(piece)
            yield piece
    finally:
        file.close()


def _header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % BLOCK)
