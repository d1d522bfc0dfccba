# SPDX-License-Identifier: Apache-2.0
"""A fake node whose agents accept layers, and providers that do or don't attach them to VMs as disks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred, fail, succeed
from zope.interface import implementer

from infranetes.images import Image
from infranetes.images.layer_disk import LayerDisk
from infranetes.providers.interface import IShowsDisks, ReadOnlyDisk, ShownDisk
from infranetes_common.concurrency import deferred
from infranetes_common.errors import DataLoss, FailedPrecondition, NotFound, Unavailable
from infranetes_common.wire import vmserver
from tests.infranetes.pods.fake_agent import FakeAgent
from tests.infranetes.pods.fake_images import FakeImages
from tests.infranetes.pods.fake_provider import FakeProvider
from tests.infranetes.pods.fakes import FakeNode

LAYER_BYTES = 1000
DIGEST = "sha256:" + "d" * 64  # of every layer's disk


def layer(number: int) -> str:
    """Return a diff id."""
    return f"sha256:{number:064x}"


def image(name: str, *layers: int, pinned: bool = False) -> Image:
    """Return an image of these layers, called `name`."""
    return Image("sha256:" + name[0] * 64, (name,), (), 1, tuple(map(layer, layers)), "", pinned)


class LayerImages(FakeImages):
    """Three images. b and c share a layer with a. :ivar broken: the error of making disks."""

    def __init__(self) -> None:
        super().__init__()
        self.all = [image("a", 1, 2), image("b", 1, 3), image("c", 2, 2, 4)]
        self.broken: Exception | None = None

    async def find(self, name_or_id: str) -> Image:
        for one in self.all:
            if name_or_id in (one.id, *one.repo_tags):
                return one
        raise NotFound(f"image {name_or_id} is not on this node: pull it first")

    def cached(self, image_id: str) -> Image | None:
        return next((one for one in self.all if one.id == image_id), None)

    async def disks(self, image_id: str) -> list[LayerDisk]:
        if self.broken is not None:
            raise self.broken
        return [
            LayerDisk(one, Path("/nonexistent"), LAYER_BYTES, DIGEST)
            for one in (await self.find(image_id)).diff_ids
        ]


@attrs.define
class Put:
    """A layer that is being sent to an agent; the test says how that ends."""

    diff_id: str
    offset: int
    ended: Deferred[None] = attrs.field(factory=Deferred, eq=False)


class LayerAgent(FakeAgent):
    """An agent that accepts layers.

    :ivar asked: the calls about layers, in order. :ivar puts: the layers that are being
        sent. :ivar sent: those that were sent.
    """

    def __init__(self, sandbox_id: str, provider: FakeProvider) -> None:
        super().__init__(sandbox_id)
        self._provider = provider
        self.mounted: set[str] = set()
        self.arrived: dict[str, int] = {}
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.puts: list[Put] = []
        self.sent: list[str] = []
        self.digest = DIGEST
        self.damaged = ""
        self.blind = False
        self.mount_error: Exception | None = None
        self.add_error: Exception | None = None
        self.mounting: Deferred[None] | None = None
        self.removing: Deferred[None] | None = None
        self.of: dict[str, tuple[str, ...]] = {}  # the layers of each image

    async def info(self, within: float = 30.0) -> Any:
        self._reach()
        self.asked.append(("info", ()))
        return vmserver.InfoResponse(sandbox_id=self.sandbox_id, takes_layers=True)

    async def load_image(self, image_id: str, archive: AsyncIterator[bytes]) -> None:
        raise AssertionError("it takes layers")

    async def images(self) -> set[str]:
        self.asked.append(("images", ()))
        return await super().images()

    async def layers(self, diff_ids: Sequence[str]) -> list[vmserver.LayerState]:
        self.asked.append(("layers", tuple(diff_ids)))
        self._reach()
        return [
            vmserver.LayerState(
                diff_id=one, mounted=one in self.mounted, arrived=self.arrived.get(one, 0), digest=self.digest
            )
            for one in diff_ids
        ]

    async def mount_layers(self, disks: Sequence[vmserver.LayerDisk]) -> None:
        self.asked.append(("mount", tuple(disk.diff_id for disk in disks)))
        if self.mounting is not None:
            await self.mounting
        self._reach()
        if self.mount_error is not None:
            raise self.mount_error
        assert isinstance(self._provider, DiskProvider)
        there = {(one.target, one.lun): one.name for one in self._provider.shown}
        for disk in disks:
            name = there.get((disk.target, disk.lun))
            if self.blind or name is None:
                raise Unavailable(f"the disk of layer {disk.diff_id} has not appeared")
            assert disk.diff_id == f"sha256:{name}"
            self.mounted.add(disk.diff_id)

    async def put_layer(self, header: vmserver.PutLayerHeader, data: AsyncIterator[bytes]) -> None:
        self._reach()
        put = Put(header.diff_id, header.offset)
        self.puts.append(put)
        try:
            await put.ended
        finally:
            self.puts.remove(put)
        self.sent.append(header.diff_id)
        self.mounted.add(header.diff_id)

    async def remove_layers(self, diff_ids: Sequence[str]) -> None:
        self.asked.append(("remove", tuple(diff_ids)))
        self._reach()
        if self.removing is not None:
            await self.removing
        needed = {one for image_id in self.loaded for one in self.of[image_id]}
        self.mounted &= needed
        self.arrived = {diff_id: size for diff_id, size in self.arrived.items() if diff_id in needed}

    async def add_image(
        self, image_id: str, configuration: bytes, disks: Sequence[vmserver.LayerDisk] = ()
    ) -> None:
        if disks:
            await self.mount_layers(disks)
        else:
            self.asked.append(("add", ()))
        self._reach()
        if self.damaged in self.mounted:
            self.mounted.discard(self.damaged)
            self.damaged = ""
            raise DataLoss("a layer is damaged on the VM's disk")
        if self.add_error is not None:
            raise self.add_error
        assert configuration == f"configuration of {image_id}".encode()
        [known] = [one for one in LayerImages().all if one.id == image_id]
        if not self.mounted.issuperset(known.diff_ids):
            raise FailedPrecondition("a layer is not mounted")
        self.of[image_id] = known.diff_ids
        self.loaded.add(image_id)

    async def remove_image(self, image_id: str) -> None:
        self._reach()
        self.loaded.discard(image_id)


@implementer(IShowsDisks)
class DiskProvider(FakeProvider):
    """Show disks to its VMs, of which there is one here.

    :ivar shown: the disks shown to the VM. :ivar show_error: the error of `show_disks`.
    """

    def __init__(self, world: FakeNode) -> None:
        super().__init__(world)
        self.shown: list[ShownDisk] = []
        self.show_error: Exception | None = None
        self.hidden: list[str] = []

    @deferred
    async def show_disks(self, instance_id: str, disks: Sequence[ReadOnlyDisk]) -> Sequence[ShownDisk]:
        self.calls.append(("show", instance_id))
        if self.show_error is not None:
            raise self.show_error
        places = []
        for disk in disks:
            known = next((one for one in self.shown if one.name == disk.name), None)
            if known is None:
                taken = {one.lun for one in self.shown}
                known = ShownDisk(disk.name, 0, next(lun for lun in range(256) if lun not in taken))
                self.shown.append(known)
            places.append(known)
        return places

    def shown_disks(self, instance_id: str) -> Deferred[Sequence[ShownDisk]]:
        if instance_id not in self.instances:
            return fail(NotFound(f"no VM {instance_id}"))
        return succeed(list(self.shown))

    def hide_disks(self, instance_id: str, names: Sequence[str]) -> Deferred[None]:
        self.calls.append(("hide", instance_id))
        self.hidden += names
        self.shown = [one for one in self.shown if one.name not in names]
        return succeed(None)


class LayerNode(FakeNode):
    """A node whose agents take layers. :param shows: whether its provider shows disks."""

    def __init__(self, shows: bool, **times: Any) -> None:
        self._shows = shows
        super().__init__(**times)

    def make_provider(self) -> FakeProvider:
        return DiskProvider(self) if self._shows else FakeProvider(self)

    def make_agent(self, sandbox_id: str) -> FakeAgent:
        return LayerAgent(sandbox_id, self.provider)

    def make_images(self) -> FakeImages:
        return LayerImages()
