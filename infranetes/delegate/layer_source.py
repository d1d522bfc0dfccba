# SPDX-License-Identifier: Apache-2.0
"""Where a node's runtime keeps what its images are made of: one interface, implemented for each runtime."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from zope.interface import Attribute, Interface, implementer

from infranetes.delegate.channel import Delegate
from infranetes.images.index import Record
from infranetes.images.manifest import Layer
from infranetes_common.errors import FailedPrecondition, Unavailable

OTHER = (
    "VMs are made of the images of containerd or CRI-O, and the node's runtime is another one: leave "
    "delegate.socket out, or give that of one of these"
)


class Runtime(Protocol):
    """Makes calls on the runtime's socket: a `Delegate`, or a `RawStub`."""

    def call(self, path: str, request: bytes, *, timeout: float) -> Awaitable[bytes]: ...


class LayersMissing(FailedPrecondition):
    """The runtime has an image, and not the layers that it was unpacked from."""


class ILayerSource(Interface):
    """Reads images' content where a runtime keeps it.

    Everything fails with `Unavailable` while the runtime can't be asked. An image's id is sha256: and 64 hex
    digits here, however the runtime spells it.
    """

    discards: str = Attribute("What to do where the runtime does not keep layers of its images.")

    async def start() -> None:
        """Make ready for use. :raise OSError: a directory can't be used."""

    async def unusable() -> str:
        """Return why VMs can't be made of this runtime's images, whichever these are; "": they can."""

    async def image(image_id: str) -> Record:
        """Return what the image is made of, without any name.

        :raise NotFound: it is not there. :raise FailedPrecondition: it can't be run in a VM."""

    async def config(image_id: str) -> bytes:
        """Return the image's configuration, whose digest is its id. :raise NotFound: it is not there."""

    def kept(digests: Collection[str]) -> AbstractAsyncContextManager[None]:
        """Keep layers from being removed until the end of the block, where there is a way to ask for that.

        :param digests: whether they are there is not looked at."""

    async def check(record: Record, digests: Collection[str]) -> None:
        """Check that these layers of the image are there.

        :raise NotFound: the image is not there any more. :raise LayersMissing: only they are not."""

    def file(layer: Layer) -> AbstractAsyncContextManager[Path]:
        """Have a layer as a file until the end of the block.

        :raise NotFound: it is not there. :raise DataLoss: it is not what it was."""


@implementer(ILayerSource)
class SourceByKind:
    """That of the runtime which the delegate is, once it has said so.

    :param sources: by the runtime's name, as its Version has it.
    """

    def __init__(self, delegate: Delegate, sources: Mapping[str, ILayerSource]) -> None:
        self._delegate = delegate
        self._sources = sources

    @property
    def discards(self) -> str:
        """See `ILayerSource`."""
        return self._source().discards

    async def start(self) -> None:
        """See `ILayerSource`."""
        for source in self._sources.values():
            await source.start()

    async def unusable(self) -> str:
        """Return why VMs can't be made of this runtime's images, such as that it is not known here."""
        if self._delegate.kind and self._delegate.kind not in self._sources:
            return OTHER
        return await self._source().unusable()

    async def image(self, image_id: str) -> Record:
        """See `ILayerSource`."""
        return await self._source().image(image_id)

    async def config(self, image_id: str) -> bytes:
        """See `ILayerSource`."""
        return await self._source().config(image_id)

    def kept(self, digests: Collection[str]) -> AbstractAsyncContextManager[None]:
        """See `ILayerSource`."""
        return self._source().kept(digests)

    async def check(self, record: Record, digests: Collection[str]) -> None:
        """See `ILayerSource`."""
        await self._source().check(record, digests)

    def file(self, layer: Layer) -> AbstractAsyncContextManager[Path]:
        """See `ILayerSource`."""
        return self._source().file(layer)

    def _source(self) -> ILayerSource:
        if not self._delegate.kind:
            raise Unavailable(f"the delegate at {self._delegate.socket} has not said yet which runtime it is")
        found = self._sources.get(self._delegate.kind)
        if found is None:
            raise FailedPrecondition(OTHER)
        return found
