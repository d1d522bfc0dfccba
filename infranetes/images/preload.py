# SPDX-License-Identifier: Apache-2.0
"""Preloaded images, which every new VM already has: one file in QEMU's template, or a disk for each layer."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import BinaryIO, Protocol

import attrs
from twisted.logger import Logger

from infranetes.images.index import Image
from infranetes.images.layer_disk import LayerDisk
from infranetes_common import image_bundle
from infranetes_common.concurrency import run_in_thread, sync_directory
from infranetes_common.errors import InfranetesError, NotFound
from infranetes_common.reactors import IReactor

_log = Logger()


class Preloadable(Protocol):
    """The source of preloaded images: the node's own store, or the other runtime's."""

    async def find(self, name_or_id: str) -> Image:
        """Return the image of this name. :raise NotFound: it is not on this node."""

    async def pull(self, name: str) -> Image:
        """Bring it to this node."""

    def archive(self, image_id: str) -> AsyncGenerator[bytes, None]:
        """The image as a tar archive."""

    async def disks(self, image_id: str) -> Sequence[LayerDisk]:
        """Return the image's layers as disks."""


@attrs.frozen
class Preload:
    """A file in the format of `infranetes_common.image_bundle`. Equal keys mean equal content."""

    key: str
    path: Path


async def gather(
    reactor: IReactor,
    store: Preloadable,
    names: Sequence[str],
    directory: Path,
    progress: Callable[[str], None],
) -> Preload | None:
    """Write these images to a file in `directory` and return it; None if there are none.

    Images that the node lacks are pulled. Preloading only makes pods faster, so failures are logged and
    otherwise ignored: an image that can't be pulled is left out, and all are if the file can't be written.
    """
    try:
        return await _gather(reactor, store, names, directory, progress)
    except OSError as error:
        _log.warn("VMs start without images: {path}: {error}", path=str(directory), error=error.strerror)
        return None


async def gather_disks(
    store: Preloadable, names: Sequence[str], progress: Callable[[str], None]
) -> Sequence[LayerDisk]:
    """Return the layers of these images as disks, each once. Fails as little as `gather`."""
    disks: dict[str, LayerDisk] = {}
    for name in names:
        image = await _image(store, name, progress)
        if image is None:
            continue
        try:
            disks |= {disk.diff_id: disk for disk in await store.disks(image.id)}
        except InfranetesError as error:
            _log.warn("VMs start without image {image}: {error}", image=name, error=error)
    return list(disks.values())


async def _gather(
    reactor: IReactor,
    store: Preloadable,
    names: Sequence[str],
    directory: Path,
    progress: Callable[[str], None],
) -> Preload | None:
    images = [image for name in names if (image := await _image(store, name, progress)) is not None]
    ids = list(dict.fromkeys(image.id for image in images))
    key = hashlib.sha256("\0".join(ids).encode()).hexdigest()[:24]
    path = directory / key
    await run_in_thread(reactor, _clear, directory, path)
    if not ids:
        return None
    if not await run_in_thread(reactor, path.exists):
        progress(f"putting {len(ids)} images together for the template")
        await _write(reactor, store, ids, path)
    return Preload(key, path)


async def _image(store: Preloadable, name: str, progress: Callable[[str], None]) -> Image | None:
    try:
        try:
            return await store.find(name)
        except NotFound:
            progress(f"pulling {name}, which every VM is to have")
            return await store.pull(name)
    except InfranetesError as error:
        _log.warn("VMs start without image {image}: {error}", image=name, error=error)
        return None


def _clear(directory: Path, keep: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in directory.iterdir():
        if path != keep:
            path.unlink()


async def _write(reactor: IReactor, store: Preloadable, ids: Sequence[str], path: Path) -> None:
    beside = path.with_name(path.name + ".new")
    file = await run_in_thread(reactor, _create, beside)
    try:
        try:
            for image_id in ids:
                await _append(reactor, store, image_id, file)
            await run_in_thread(reactor, _finish, file)
        finally:
            await run_in_thread(reactor, file.close)
        await run_in_thread(reactor, _rename, beside, path)
    except BaseException:
        await run_in_thread(reactor, beside.unlink, True)  # it may be what fills the disk
        raise


async def _append(reactor: IReactor, store: Preloadable, image_id: str, file: BinaryIO) -> None:
    start, size = file.tell(), 0
    file.seek(image_bundle.BLOCK, os.SEEK_CUR)
    async with aclosing(store.archive(image_id)) as chunks:
        async for chunk in chunks:
            await run_in_thread(reactor, file.write, chunk)
            size += len(chunk)
    end = file.tell()
    file.seek(start)
    file.write(image_bundle.header(image_bundle.Section(image_id, size)))
    file.seek(end)


def _create(path: Path) -> BinaryIO:
    return path.open("wb")


def _rename(beside: Path, path: Path) -> None:
    beside.replace(path)
    sync_directory(path.parent)


def _finish(file: BinaryIO) -> None:
    file.write(bytes(image_bundle.BLOCK))
    file.flush()
    os.fsync(file.fileno())
