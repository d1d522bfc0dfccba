# SPDX-License-Identifier: Apache-2.0
"""The images of a node whose pods are of several kinds: each name is of one store, which has all of it.

A reference names its store by its domain, `CATALOGUE.infranetes.io/`; all others are of the node's own store.
Anything else is an id, or its beginning, and is looked for in all stores.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

import attrs

from infranetes.images.catalogue import CatalogueStore
from infranetes.images.index import Image
from infranetes.images.layer_disk import LayerDisk
from infranetes.images.store import ImageStore
from infranetes.images.usage import FsUsage
from infranetes_common.errors import InvalidArgument, NotFound

Store = ImageStore | CatalogueStore

DOMAIN = ".infranetes.io/"


class SeveralStores:
    """The stores of one node as one.

    :param stores: by the names of their catalogues, `docker` for that of containers' images; the node's own,
        whose references need no domain, is the first.
    """

    def __init__(self, stores: Mapping[str, Store]) -> None:
        self._stores = dict(stores)
        self._own = next(iter(stores.values()))

    @property
    def machine_images(self) -> bool:
        """Whether the images of the node's own store are whole machines."""
        return self._own.machine_images

    async def start(self) -> None:
        """Start each. :raise ConfigError: the directory can't be used."""
        for store in self._stores.values():
            await store.start()

    async def stop(self) -> None:
        """Stop each. Idempotent."""
        for store in self._stores.values():
            await store.stop()

    @property
    def containers(self) -> ImageStore | None:
        """The store of containers' images; None: there is none."""
        return next((each for each in self._stores.values() if isinstance(each, ImageStore)), None)

    @property
    def catalogues(self) -> list[CatalogueStore]:
        """The stores of catalogues."""
        return [each for each in self._stores.values() if isinstance(each, CatalogueStore)]

    def of_name(self, name: str) -> Store:
        """Return the store that images called so are pulled to."""
        return next(
            (self._stores[each] for each in self._stores if name.startswith(each + DOMAIN)), self._own
        )

    def source(self, image_id: str) -> str:
        """Return the name of the store that has the image. :raise NotFound: none has."""
        name, _ = self._found(image_id)
        return name

    def list(self) -> list[Image]:
        """Every image, of one store after the other."""
        return [image for store in self._stores.values() for image in store.list()]

    def resolve(self, name_or_id: str) -> Image:
        """Return the image that a reference, an id or the beginning of an id means.

        :raise NotFound: not pulled on this node. :raise InvalidArgument: ambiguous."""
        _, image = self._found(name_or_id)
        return image

    async def find(self, name_or_id: str) -> Image:
        """Return what `resolve` does."""
        return self.resolve(name_or_id)

    def cached(self, image_id: str) -> Image | None:
        """Return the image with this id, if a store knows it; None: none does."""
        return next((image for store in self._stores.values() if (image := store.cached(image_id))), None)

    async def remove(self, name_or_id: str) -> None:
        """Remove the image under all of its names. Idempotent."""
        try:
            name, image = self._found(name_or_id)
        except NotFound:
            return
        await self._stores[name].remove(image.id)

    async def config(self, image_id: str) -> bytes:
        """Call the same method of the image's store."""
        return await self._store(image_id).config(image_id)

    def archive(self, image_id: str, present: int = 0) -> AsyncIterator[bytes]:
        """Call the same method of the image's store."""
        return self._store(image_id).archive(image_id, present)

    def held(self, image_id: str) -> AbstractAsyncContextManager[None]:
        """Call the same method of the image's store."""
        return self._store(image_id).held(image_id)

    async def disks(self, image_id: str) -> Sequence[LayerDisk]:
        """Call the same method of the image's store."""
        return await self._store(image_id).disks(image_id)

    async def check(self, image_id: str) -> None:
        """Call the same method of each store. An image that has left this node is forgotten already."""
        for store in self._stores.values():
            await store.check(image_id)

    async def fs_usage(self) -> FsUsage:
        """Return the usage of all stores, at the place of the one of containers' images, if there is one."""
        first = await (self.containers or self._own).fs_usage()
        others = [store for store in self._stores.values() if store is not (self.containers or self._own)]
        usages = [first, *[await store.fs_usage() for store in others]]
        return attrs.evolve(
            first,
            used_bytes=sum(each.used_bytes for each in usages),
            inodes_used=sum(each.inodes_used for each in usages),
        )

    def _store(self, image_id: str) -> Store:
        return self._stores[self._found(image_id)[0]]

    def _found(self, name_or_id: str) -> tuple[str, Image]:
        images: dict[str, Image] = {}
        for name, store in self._stores.items():
            others = store is not self._own and not name_or_id.startswith(name + DOMAIN)
            if others and not _may_be_id(name_or_id):
                continue
            try:
                images[name] = store.resolve(name_or_id)
            except NotFound:
                continue
        if len(images) > 1:
            raise InvalidArgument(f"image {name_or_id[:300]!r} may be one of {len(images)}; give more digits")
        if not images:
            raise NotFound(f"image {name_or_id[:300]!r} is not on this node; pull it")
        return next(iter(images.items()))


def as_one(stores: Mapping[str, Store]) -> Store | SeveralStores:
    """Return the stores, by their names and the node's own first, as one."""
    return SeveralStores(stores) if len(stores) > 1 else next(iter(stores.values()))


def container_images(images: Store | SeveralStores) -> ImageStore | None:
    """Return the store of containers' images among a node's; None: it has none."""
    if isinstance(images, SeveralStores):
        return images.containers
    return images if isinstance(images, ImageStore) else None


def _may_be_id(text: str) -> bool:
    digits = text.removeprefix("sha256:")
    return bool(digits) and set(digits) <= set("0123456789abcdef")
