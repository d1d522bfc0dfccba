# SPDX-License-Identifier: Apache-2.0
"""Images that are made of layers: their configurations, in files."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import attrs
from twisted.logger import Logger

from infranetes_common import bounded_json
from infranetes_common.concurrency import IMAGES, replace_file, run_in_thread
from infranetes_common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from infranetes_common.reactors import IReactor
from vmserver import validate
from vmserver.layers.rootfs import MAX_LAYERS
from vmserver.layers.store import LayerStore

MAX_CONFIGURATION = 4 * 1024 * 1024  # bytes; the limit of skopeo and containerd
MAX_IMAGES = 1024

T = TypeVar("T")

_log = Logger()


@attrs.frozen
class LayeredImage:
    """An image.

    :ivar configuration: JSON (OCI image-spec, config.md); its digest is the image's id.
    :ivar diff_ids: the layers, lowest first.
    """

    id: str
    configuration: bytes = attrs.field(repr=False)
    diff_ids: tuple[str, ...]


class LayerImages:
    """The images. Their state is only in files, where a restarted agent finds it.

    A layer that one of them needs is not removed from `store`. Whether a container uses an image is for the
    caller to know.

    :param directory: on a disk; a file for each image.
    """

    def __init__(self, reactor: IReactor, store: LayerStore, directory: Path) -> None:
        self._reactor = reactor
        self._store = store
        self._directory = directory
        self._read: dict[str, LayeredImage] = {}
        store.needed = self._thd_needed

    async def add(self, image_id: str, configuration: bytes) -> LayeredImage:
        """Make an image from layers that are here. Idempotent.

        :raise InvalidArgument: not the configuration of that image.
        :raise FailedPrecondition: a layer is not here, or there are more layers than can be mounted.
        :raise DataLoss: a layer is damaged, and was deleted. :raise ResourceExhausted: the disk is full.
        """
        image = await self._in_thread(lambda: parse(image_id, configuration))
        if len(set(image.diff_ids)) > MAX_LAYERS:
            raise FailedPrecondition(
                f"image {image_id} has {len(image.diff_ids)} layers: at most {MAX_LAYERS} can be mounted"
            )
        async with self._store.changing:
            await self._store.need(image.diff_ids)
            await self._in_thread(lambda: self._thd_keep(image))
        return image

    async def get(self, image_id: str) -> LayeredImage:
        """Return an image. :raise FailedPrecondition: there is none."""
        image = await self._in_thread(lambda: self._thd_images().get(image_id))
        if image is None:
            raise FailedPrecondition(f"image {image_id} is not in this VM: the node has to call AddImage")
        return image

    async def directories(self, image: LayeredImage) -> list[Path]:
        """Return where an image's layers are mounted, lowest first.

        :raise FailedPrecondition: a layer is not here. :raise DataLoss: one is damaged, and was deleted.
        """
        return await self._store.need(image.diff_ids)

    async def ids(self) -> list[str]:
        """List the ids of the images all of whose layers are here: after a boot, some may not be."""
        return await self._in_thread(
            lambda: sorted(
                image.id
                for image in self._thd_images().values()
                if all(map(self._store.whole, dict.fromkeys(image.diff_ids)))
            )
        )

    async def remove(self, image_id: str) -> None:
        """Remove an image; its layers stay until the node removes them. Does nothing if there is none."""
        async with self._store.changing:
            await self._in_thread(lambda: self._thd_remove(image_id))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await run_in_thread(self._reactor, work, purpose=IMAGES)

    def _thd_keep(self, image: LayeredImage) -> None:
        if len(self._thd_images().keys() - {image.id}) >= MAX_IMAGES:
            raise ResourceExhausted(f"the VM has {MAX_IMAGES} images: remove some")
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Not durable, as the layers' files and the containers' records are not: the node adds it again.
            replace_file(self._path(image.id), image.configuration, durable=False)
        except OSError as error:
            kind = ResourceExhausted if error.errno in (errno.ENOSPC, errno.EDQUOT) else FailedPrecondition
            raise kind(f"image {image.id} can't be kept on the VM's disk: {error}") from None
        self._read[image.id] = image

    def _thd_remove(self, image_id: str) -> None:
        self._path(image_id).unlink(missing_ok=True)
        self._read.pop(image_id, None)

    def _thd_needed(self) -> Collection[str]:
        return {diff_id for image in self._thd_images().values() for diff_id in image.diff_ids}

    def _thd_images(self) -> dict[str, LayeredImage]:
        found = {}
        try:
            names = os.listdir(self._directory)
        except FileNotFoundError:
            return {}
        for name in names:
            image_id = f"sha256:{name}"
            if not validate.DIGEST.fullmatch(image_id):
                continue  # a temporary file, left before it could replace an image's
            try:
                image = self._read.get(image_id) or parse(image_id, (self._directory / name).read_bytes())
            except (InvalidArgument, OSError) as error:
                _log.error(
                    "image {image} can't be read, and is left as it is: {words}",
                    image=image_id,
                    words=str(error),
                )
                continue
            found[image_id] = self._read[image_id] = image
        return found

    def _path(self, image_id: str) -> Path:
        return self._directory / image_id.removeprefix("sha256:")


def parse(image_id: str, configuration: bytes) -> LayeredImage:
    """Read an image's configuration.

    :raise InvalidArgument: it is another image's, or no configuration.
    """
    if len(configuration) > MAX_CONFIGURATION:
        raise InvalidArgument(f"configuration of {image_id}: over {MAX_CONFIGURATION} bytes")
    digest = f"sha256:{hashlib.sha256(configuration).hexdigest()}"
    if digest != image_id:
        raise InvalidArgument(f"configuration of {image_id}: its digest is {digest}")
    try:
        content = bounded_json.loads(configuration)
        diff_ids = content["rootfs"]["diff_ids"]
        if not isinstance(diff_ids, list) or not all(isinstance(one, str) for one in diff_ids):
            raise TypeError("rootfs.diff_ids")
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise InvalidArgument(
            f"configuration of {image_id}: no rootfs.diff_ids in it: {error!r:.200}"
        ) from None
    return LayeredImage(image_id, configuration, tuple(validate.diff_ids(diff_ids)))
