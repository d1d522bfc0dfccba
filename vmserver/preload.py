"""Loads the images that the node gave a template, before it is frozen: each clone has them from the start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, BinaryIO

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger

from infranetes_common import bundle
from infranetes_common.errors import InvalidArgument
from vmserver.containers.interface import IContainerProvider

DISK = Path("/dev/disk/by-id") / f"virtio-{bundle.SERIAL}"

_PIECE = 256 * 1024

_log = Logger()


async def preload(reactor: Any, provider: IContainerProvider, disk: Path = DISK) -> None:
    """Hand each image of `disk` to `provider`; no disk: nothing to do. What fails is told to the log, and
    those images come when a container asks for them."""
    try:
        file: BinaryIO = await _in_thread(reactor, _open, disk)
    except FileNotFoundError:
        return
    try:
        with file:
            while section := bundle.parse(await _read(reactor, file, bundle.BLOCK)):
                begun, end = reactor.seconds(), file.tell() + section.size
                await provider.load_image(section.image_id, _pieces(reactor, file, section.size))
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


def _in_thread(reactor: Any, work: Callable[..., Any], *args: Any) -> Deferred[Any]:
    return deferToThreadPool(reactor, reactor.getThreadPool(), work, *args)


async def _pieces(reactor: Any, file: BinaryIO, size: int) -> AsyncIterator[bytes]:
    while size:
        piece = await _read(reactor, file, min(_PIECE, size))
        size -= len(piece)
        yield piece


async def _read(reactor: Any, file: BinaryIO, size: int) -> bytes:
    """Exactly `size` bytes, in a thread: a disk may take its time."""
    data: bytes = await _in_thread(reactor, file.read, size)
    if len(data) != size:
        raise InvalidArgument("the disk of images ends in the middle of one")
    return data
