# SPDX-License-Identifier: Apache-2.0
"""What pods need of the node's images."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from infranetes.images import Image, LayerDisk


class Images(Protocol):
    """The images of this node: `ImageStore` or `CatalogueStore`."""

    @property
    def machine_images(self) -> bool:
        """Whether the images are whole machines: a sandbox then has no VM until a container names one."""

    async def find(self, name_or_id: str) -> Image:
        """Return the image that a reference, an id or a prefix of an id means now.

        :raise NotFound: it is not pulled on this node. :raise InvalidArgument: it is ambiguous.
        :raise Unavailable: this can't be determined now."""

    def cached(self, image_id: str) -> Image | None:
        """Return the image if it is known without any I/O, or None."""

    def archive(self, image_id: str, present: int = 0) -> AsyncIterator[bytes]:
        """Iterate over the image as a tar archive, without its lowest `present` layers."""

    async def config(self, image_id: str) -> bytes:
        """Return the image's configuration, whose digest is its id.

        :raise NotFound: the image is no longer on this node."""

    async def disks(self, image_id: str) -> Sequence[LayerDisk]:
        """Return the image's layers as disks, lowest first, making those that are missing.

        :raise FailedPrecondition: the image can't be made into disks.
        :raise ResourceExhausted: there is no room for them."""

    def held(self, image_id: str) -> AbstractAsyncContextManager[None]:
        """Keep the files of `disks` until the end of the block, even if the image is removed meanwhile.

        :raise NotFound: the image is no longer on this node."""

    async def check(self, image_id: str) -> None:
        """Forget the image if the catalogue that it was found in no longer has it."""
