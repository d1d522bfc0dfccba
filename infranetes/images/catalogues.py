# SPDX-License-Identifier: Apache-2.0
"""Several catalogues' images as one, beside the images of a runtime that is not ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from infranetes.images.catalogue import CatalogueStore
from infranetes.images.index import Image
from infranetes.images.usage import FsUsage
from infranetes_common.errors import NotFound, Unimplemented


class CatalogueSet:
    """The images of some catalogues, each distinguished from the others by its domain or its id."""

    def __init__(self, stores: Sequence[CatalogueStore]) -> None:
        self._stores = stores

    async def start(self) -> None:
        """Start each. :raise ConfigError: a directory can't be used."""
        for store in self._stores:
            await store.start()

    async def stop(self) -> None:
        """Stop each. Idempotent."""
        for store in self._stores:
            await store.stop()

    def owns(self, name_or_id: str) -> bool:
        """Return whether a name or id is of an image, pulled or not, in one of these catalogues."""
        return self.store_of(name_or_id) is not None

    def list(self) -> list[Image]:
        """Return every image, catalogue by catalogue."""
        return [image for store in self._stores for image in store.list()]

    def resolve(self, name_or_id: str) -> Image:
        """See `CatalogueStore.resolve`."""
        return self._store(name_or_id).resolve(name_or_id)

    async def config(self, image_id: str) -> bytes:
        """See `CatalogueStore.config`."""
        return await self._store(image_id).config(image_id)

    async def pull(self, name: str, annotations: Mapping[str, str]) -> Image:
        """See `CatalogueStore.pull`."""
        return await self._store(name).pull(name, annotations)

    async def remove(self, name_or_id: str) -> None:
        """See `CatalogueStore.remove`."""
        store = self.store_of(name_or_id)
        if store is not None:
            await store.remove(name_or_id)

    async def fs_usage(self) -> FsUsage:
        """Fail: kubelet wants to know of the disk on which the other runtime has its images.

        :raise Unimplemented: always.
        """
        raise Unimplemented("the node's own runtime reports the disk that its images use")

    def store_of(self, name_or_id: str) -> CatalogueStore | None:
        """Return the catalogue's store whose image it is; None: it is of none."""
        return next((store for store in self._stores if store.owns(name_or_id)), None)

    def _store(self, name_or_id: str) -> CatalogueStore:
        """Return the store of a name. :raise NotFound: no catalogue has such names."""
        store = self.store_of(name_or_id)
        if store is None:
            raise NotFound(f"image {name_or_id[:300]!r} belongs to no catalogue of this node")
        return store
