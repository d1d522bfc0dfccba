# SPDX-License-Identifier: Apache-2.0
"""All images of a node with a delegate: the delegate's own, and those of our catalogues."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

from infranetes.delegate.images import DelegateImages
from infranetes.images.catalogue import CatalogueStore
from infranetes.images.catalogues import CatalogueSet
from infranetes.images.config import ImagesConfig
from infranetes.images.index import Image
from infranetes.images.layer_disk import LayerDisk

CONTAINERS = "docker"  # the kind of the delegate's images, as in `imgprovider`


class NodeImages:
    """Implements `Images` of `infranetes.pods.node.context`. Call `start` first.

    :ivar catalogues: the images that this daemon serves itself, to those who ask for one by name.
    :ivar delegate: the images that the delegate serves.
    """

    machine_images = False  # pods that don't choose are made of container images

    def __init__(self, catalogues: CatalogueSet, delegate: DelegateImages) -> None:
        self.catalogues = catalogues
        self.delegate = delegate

    async def start(self) -> None:
        """Start each. :raise ConfigError: a directory can't be used."""
        await self.catalogues.start()
        await self.delegate.start()

    async def stop(self) -> None:
        """End what is under way. Idempotent."""
        await self.delegate.stop()
        await self.catalogues.stop()

    def reconfigure(self, config: ImagesConfig) -> None:
        """See `DelegateImages.reconfigure`."""
        self.delegate.reconfigure(config)

    def source(self, image_id: str) -> str:
        """Return the name of the catalogue that has the image, or CONTAINERS."""
        store = self.catalogues.store_of(image_id)
        return CONTAINERS if store is None else store.name

    async def find(self, name_or_id: str) -> Image:
        """Return the image that a reference or an id means now. Raises as the one store or the other."""
        return await self._of(name_or_id).find(name_or_id)

    def cached(self, image_id: str) -> Image | None:
        """Return what is known of the image without asking anybody; None: nothing."""
        return self._of(image_id).cached(image_id)

    async def config(self, image_id: str) -> bytes:
        """Return the image's configuration."""
        return await self._of(image_id).config(image_id)

    async def disks(self, image_id: str) -> Sequence[LayerDisk]:
        """Return the image's layers as disks."""
        return await self._of(image_id).disks(image_id)

    def archive(self, image_id: str, present: int = 0) -> AsyncGenerator[bytes, None]:
        """Return the image as an archive."""
        return self._of(image_id).archive(image_id, present)

    @asynccontextmanager
    async def held(self, image_id: str) -> AsyncIterator[None]:
        """Keep the image's disks until the end of the block."""
        async with self._of(image_id).held(image_id):
            yield

    async def check(self, image_id: str) -> None:
        """Forget the image if the catalogue that it was found in no longer has it."""
        await self._of(image_id).check(image_id)

    def _of(self, name_or_id: str) -> CatalogueStore | DelegateImages:
        return self.catalogues.store_of(name_or_id) or self.delegate
