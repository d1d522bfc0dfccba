"""Images that every VM has from the start: one file of them for the provider that boots templates."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import attrs
from twisted.logger import Logger

from infranetes.images.index import Image
from infranetes.images.store import ImageStore
from infranetes.threads import in_thread
from infranetes_common import bundle
from infranetes_common.errors import InfranetesError, NotFound

_log = Logger()


@attrs.frozen
class Preload:
    """A file as `infranetes_common.bundle` describes it. The same key is the same content."""

    key: str
    path: Path


async def gather(
    reactor: Any, store: ImageStore, names: Sequence[str], directory: Path, progress: Callable[[str], None]
) -> Preload | None:
    """The file of these images, in `directory`; None where there are none. An image that the node does
    not have is pulled; one that can't be had is left out, with a word in the log, and so are all where the
    file can't be written: pods come before speed.
    """
    try:
        return await _gather(reactor, store, names, directory, progress)
    except OSError as error:
        _log.warn("VMs start without images: {path}: {error}", path=str(directory), error=error.strerror)
        return None


async def _gather(
    reactor: Any, store: ImageStore, names: Sequence[str], directory: Path, progress: Callable[[str], None]
) -> Preload | None:
    images = [image for name in names if (image := await _image(store, name, progress)) is not None]
    ids = list(dict.fromkeys(image.id for image in images))
    key = hashlib.sha256("\0".join(ids).encode()).hexdigest()[:24]
    path = directory / key
    await in_thread(reactor, _clear, directory, path)
    if not ids:
        return None
    if not await in_thread(reactor, path.exists):
        progress(f"putting {len(ids)} images together for the template")
        await _write(reactor, store, ids, path)
    return Preload(key, path)


async def _image(store: ImageStore, name: str, progress: Callable[[str], None]) -> Image | None:
    try:
        try:
            return store.resolve(name)
        except NotFound:
            progress(f"pulling {name} for the template")
            return await store.pull(name)
    except InfranetesError as error:
        _log.warn("VMs start without image {image}: {error}", image=name, error=error)
        return None


def _clear(directory: Path, keep: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in directory.iterdir():
        if path != keep:
            path.unlink()


async def _write(reactor: Any, store: ImageStore, ids: Sequence[str], path: Path) -> None:
    beside = path.with_name(path.name + ".new")
    file: BinaryIO = await in_thread(reactor, beside.open, "wb")
    try:
        for image_id in ids:
            await _append(reactor, store, image_id, file)
        await in_thread(reactor, _finish, file)
    finally:
        await in_thread(reactor, file.close)
    await in_thread(reactor, beside.replace, path)


async def _append(reactor: Any, store: ImageStore, image_id: str, file: BinaryIO) -> None:
    start, size = file.tell(), 0
    file.seek(bundle.BLOCK, os.SEEK_CUR)
    pieces: Any = store.archive(image_id)
    try:
        async for piece in pieces:
            await in_thread(reactor, file.write, piece)
            size += len(piece)
    finally:
        await pieces.aclose()
    end = file.tell()
    file.seek(start)
    file.write(bundle.header(bundle.Section(image_id, size)))
    file.seek(end)


def _finish(file: BinaryIO) -> None:
    file.write(bytes(bundle.BLOCK))
    file.flush()
    os.fsync(file.fileno())
