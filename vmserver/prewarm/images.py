# SPDX-License-Identifier: Apache-2.0
"""The images that the node gives a template on a disk, loaded before it is frozen."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import BinaryIO, Protocol

from twisted.logger import Logger

from infranetes_common import image_bundle
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import InvalidArgument
from infranetes_common.reactors import IReactor

DISK = Path("/dev/disk/by-id") / f"virtio-{image_bundle.SERIAL}"

_CHUNK = 256 * 1024

_log = Logger()


class ImageLoader(Protocol):
    """The part of `IContainerProvider` that this module needs."""

    def load_image(self, image_id: str, archive: AsyncIterator[bytes]) -> Awaitable[None]: ...


async def load_images(reactor: IReactor, provider: ImageLoader, disk: Path = DISK) -> None:
    """Load each image of `disk`, if there is such a disk.

    A failure is only logged: images that are missing come when a container needs them.
    """
    try:
        file = await run_in_thread(reactor, _open, disk)
    except FileNotFoundError:
        return
    try:
        with file:
            while section := image_bundle.parse(await _read(reactor, file, image_bundle.BLOCK)):
                begun, end = reactor.seconds(), file.tell() + section.size
                await provider.load_image(section.image_id, _chunks(reactor, file, section.size))
                file.seek(end)
                _log.info(
                    "image {image} is in the template after {seconds:.1f} s",
                    image=section.image_id,
                    seconds=reactor.seconds() - begun,
                )
    except Exception as error:
        _log.warn(
            "the template's images could not be loaded: {kind}: {error}",
            kind=type(error).__name__,
            error=error,
        )


def _open(disk: Path) -> BinaryIO:
    return open(disk, "rb", buffering=0)


async def _chunks(reactor: IReactor, file: BinaryIO, size: int) -> AsyncIterator[bytes]:
    while size:
        chunk = await _read(reactor, file, min(_CHUNK, size))
        size -= len(chunk)
        yield chunk


async def _read(reactor: IReactor, file: BinaryIO, size: int) -> bytes:
    """Read exactly `size` bytes, in a thread."""
    data = await run_in_thread(reactor, file.read, size)
    if len(data) != size:
        raise InvalidArgument("the disk of images ends in the middle of one")
    return data
