# SPDX-License-Identifier: Apache-2.0
"""An image as a tar for `docker load` (moby's image/tarexport, and Docker's image spec v1.2).

The tar has `manifest.json`, the configuration and the layers, under names made here. All sizes are known
beforehand, so it can be streamed. gzip layers stay as they are; zstd layers, which Docker 20.10 can't read,
are uncompressed.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Protocol, TypeVar, TypeVarTuple

from infranetes.images.index import Record
from infranetes.images.layers import CHUNK_BYTES, uncompressed
from infranetes_common.errors import FailedPrecondition, Unavailable

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

BLOCK = tarfile.BLOCKSIZE
DOCKER_LAYERS = 125  # moby's `layer.MaxLayerDepth`


class InThread(Protocol):
    """Makes a blocking call in a thread."""

    def __call__(self, work: Callable[[*Ts], T], /, *args: *Ts) -> Awaitable[T]: ...


async def stream(
    record: Record, blobs: Path, present: int, in_thread: InThread
) -> AsyncGenerator[bytes, None]:
    """Yield the tar in chunks of at most 256 KiB.

    :param present: how many of the lowest layers are left out; the manifest still names them.
    :raise Unavailable: a blob was changed or removed meanwhile.
    :raise FailedPrecondition: it has more layers than Docker takes.
    """
    if len(record.diff_ids) > DOCKER_LAYERS:
        raise FailedPrecondition(
            f"image {record.id} has {len(record.diff_ids)} layers, Docker stacks {DOCKER_LAYERS}; build it "
            'with fewer, or give the pod a handler with contprovider = "oci"'
        )
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
        path = blobs / digest.removeprefix("sha256:")
        async with aclosing(_content(path, compression, size, in_thread)) as chunks:
            async for chunk in chunks:
                yield chunk
        if size % BLOCK:
            yield _padding(size)
    yield bytes(2 * BLOCK)


async def _content(
    path: Path, compression: str, size: int, in_thread: InThread
) -> AsyncGenerator[bytes, None]:
    """Yield exactly `size` bytes. Each chunk is read in a thread, since a cold or busy disk is slow."""
    try:
        file = await in_thread(uncompressed, path, compression)
    except OSError as e:
        raise Unavailable(
            f"blob sha256:{path.name} can't be read: {e.strerror}; pull the image again"
        ) from None
    try:
        left = size
        while left:
            chunk = await in_thread(file.read, min(CHUNK_BYTES, left))
            if not chunk:
                raise Unavailable(f"blob sha256:{path.name} is {left} bytes short; pull the image again")
            left -= len(chunk)
            yield chunk
    finally:
        file.close()


def _header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % BLOCK)
