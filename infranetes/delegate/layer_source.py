# SPDX-License-Identifier: Apache-2.0
"""The interface to the layers that a node's runtime keeps of its images, implemented for each runtime."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

from google.protobuf.message import DecodeError
from zope.interface import Attribute, Interface, implementer

from infranetes.delegate.channel import Delegate
from infranetes.delegate.errors import as_error
from infranetes.images.index import Record
from infranetes.images.manifest import Layer
from infranetes_common.errors import FailedPrecondition, Unavailable
from txgrpc import GrpcError

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
    """The layer source of the delegate's runtime, chosen by the name that the delegate gives.

    :param sources: by the runtime's name, as in its answer to Version.
    """

    def __init__(self, delegate: Delegate, sources: Mapping[str, ILayerSource]) -> None:
        self._delegate = delegate
        self._sources = sources

    @property
    def discards(self) -> str:
        """See `ILayerSource`; that the runtime is not known here, if so."""
        found = self._sources.get(self._delegate.kind)
        return OTHER if found is None else found.discards

    async def start(self) -> None:
        """See `ILayerSource`."""
        for source in self._sources.values():
            await source.start()

    async def unusable(self) -> str:
        """Return why VMs can't be made of this runtime's images, such as that it is not known here."""
        try:
            source = await self._source()
        except FailedPrecondition as error:
            return str(error)
        return await source.unusable()

    async def image(self, image_id: str) -> Record:
        """See `ILayerSource`."""
        return await (await self._source()).image(image_id)

    async def config(self, image_id: str) -> bytes:
        """See `ILayerSource`."""
        return await (await self._source()).config(image_id)

    @asynccontextmanager
    async def kept(self, digests: Collection[str]) -> AsyncIterator[None]:
        """See `ILayerSource`."""
        async with (await self._source()).kept(digests):
            yield

    async def check(self, record: Record, digests: Collection[str]) -> None:
        """See `ILayerSource`."""
        await (await self._source()).check(record, digests)

    @asynccontextmanager
    async def file(self, layer: Layer) -> AsyncIterator[Path]:
        """See `ILayerSource`."""
        async with (await self._source()).file(layer) as path:
            yield path

    async def _source(self) -> ILayerSource:
        try:
            kind = await self._delegate.asked_kind()
        except GrpcError as error:
            raise as_error("the node's runtime", error) from None
        except DecodeError:
            raise Unavailable("the answer of the node's runtime to Version can't be read") from None
        found = self._sources.get(kind)
        if found is None:
            raise FailedPrecondition(OTHER)
        return found
