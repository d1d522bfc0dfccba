# SPDX-License-Identifier: Apache-2.0
"""The fake provider with images that are made of layers, which arrive and are verified but not mounted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from twisted.internet.defer import Deferred, fail
from zope.interface import implementer

from infranetes_common.concurrency import deferred
from infranetes_common.errors import Unimplemented
from infranetes_common.reactors import IReactor
from infranetes_simulation.containers.provider import FakeProvider
from vmserver.containers.interface import ITakesLayers
from vmserver.layers.images import LayerImages
from vmserver.layers.store import LayerStore


@implementer(ITakesLayers)
class LayeredFakeProvider(FakeProvider):
    """See `ITakesLayers`. Its disk is its directory."""

    def __init__(self, reactor: IReactor, directory: Path) -> None:
        super().__init__(reactor, directory)
        self.layers = LayerStore(reactor, directory / "layers", directory / "points", mount=False)
        self._made_of_layers = LayerImages(reactor, self.layers, directory / "configurations")

    @deferred
    async def add_image(self, image_id: str, configuration: bytes) -> None:
        await self._made_of_layers.add(image_id, configuration)

    def images(self) -> Deferred[list[str]]:
        return Deferred.fromCoroutine(self._made_of_layers.ids())

    @deferred
    async def remove_image(self, image_id: str) -> None:
        self._check_unused(image_id)
        await self._made_of_layers.remove(image_id)

    def missing_layers(self, diff_ids: Sequence[str]) -> Deferred[int]:
        return fail(Unimplemented(_WORDS))

    def load_image(self, image_id: str, archive: AsyncIterator[bytes]) -> Deferred[None]:
        return fail(Unimplemented(_WORDS))


_WORDS = "this simulated VM takes images as layers"
