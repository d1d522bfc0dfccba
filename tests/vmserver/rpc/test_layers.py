# SPDX-License-Identifier: Apache-2.0
"""The agent's RPCs about layers, over mutual TLS; its provider has a store and mounts what it is sent."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from zope.interface import implementer

from infranetes_common.concurrency import deferred, start
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentStub
from infranetes_simulation.containers import FakeProvider
from tests.harness.needs import needs_mounts, needs_programs, needs_root
from tests.support.erofs import Layer, layer
from tests.vmserver.harness import Agent, run_directory
from tests.vmserver.layers.case import PIECE, Shown
from tests.vmserver.layers.test_images import image
from tests.vmserver.rpc.test_agent import AgentCase, reactor
from txgrpc import Code
from vmserver.containers.interface import ITakesLayers
from vmserver.layers import store
from vmserver.layers.images import LayerImages
from vmserver.layers.store import BATCH_BYTES, LayerStore
from vmserver.machine.mounts import mounts_below, unmount

LAYER = layer({"hello": b"hello", "big": b"0123456789abcdef" * 40_000})


@implementer(ITakesLayers)
class LayeredProvider(FakeProvider):
    """A container provider that fakes containers, and accepts images as layers."""

    def __init__(self, directory: Path, store: LayerStore) -> None:
        super().__init__(reactor, directory)
        self.layers = store
        self.layered = LayerImages(reactor, store, directory / "images")

    @deferred
    async def add_image(self, image_id: str, configuration: bytes) -> None:
        await self.layered.add(image_id, configuration)


@needs_mounts
@needs_programs("mkfs.erofs")
class LayerCallTests(AgentCase):
    async def setUp(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="layers-"))
        self.addCleanup(self._remove)
        self.shown = Shown(self.base, self)
        directory = run_directory(self)
        await self.begin(Agent(reactor, directory, provider=lambda: self.make_provider(directory / "fake")))

    def make_provider(self, directory: Path) -> LayeredProvider:
        store = LayerStore(reactor, self.base / "files", self.base / "points", disks=self.shown.disks())
        return LayeredProvider(directory, store)

    def _remove(self) -> None:
        for one in reversed(mounts_below(self.base)):
            unmount(one.point)
        shutil.rmtree(self.base)

    def put(self, one: Layer = LAYER, *, content: bytes | None = None, **fields: Any) -> Deferred[Any]:
        sent = one.content if content is None else content

        async def requests() -> AsyncIterator[messages.PutLayerRequest]:
            named = {"diff_id": one.diff_id, "size": len(one.content), "digest": one.digest}
            yield messages.PutLayerRequest(header=messages.PutLayerHeader(**{**named, **fields}))
            for at in range(0, len(sent), PIECE):
                yield messages.PutLayerRequest(data=sent[at : at + PIECE])

        putting: Deferred[Any] = self.stub.PutLayer(requests(), timeout=20.0)
        return putting

    async def state(self, one: Layer = LAYER) -> messages.LayerState:
        request = messages.ListLayersRequest(diff_ids=[one.diff_id])
        [state] = (await self.stub.ListLayers(request, timeout=10.0)).layers
        return messages.LayerState.FromString(state.SerializeToString())

    def mount(self, **fields: Any) -> Deferred[Any]:
        disk = messages.LayerDisk(**{"diff_id": LAYER.diff_id, **fields})
        mounting: Deferred[Any] = self.stub.MountLayers(
            messages.MountLayersRequest(disks=[disk]), timeout=20.0
        )
        return mounting

    def add(self, image_id: str, configuration: bytes, *disks: messages.LayerDisk) -> Deferred[Any]:
        request = messages.AddImageRequest(image_id=image_id, configuration=configuration, disks=disks)
        adding: Deferred[Any] = self.stub.AddImage(request, timeout=10.0)
        return adding

    async def remove(self, *diff_ids: str) -> None:
        await self.stub.RemoveLayers(messages.RemoveLayersRequest(diff_ids=diff_ids), timeout=10.0)

    async def test_it_says_that_it_takes_layers(self) -> None:
        self.assertTrue((await self.stub.Info(messages.InfoRequest(), timeout=10.0)).takes_layers)

    async def test_a_disk_becomes_an_image(self) -> None:
        self.shown.show(LAYER, 1, 7)
        for _ in range(2):
            await self.mount(target=1, lun=7)
            await self.add(*image(LAYER.diff_id))
        state = await self.state()
        self.assertEqual((state.mounted, state.arrived, state.digest), (True, 0, ""))
        await self.remove(LAYER.diff_id)
        self.assertTrue((await self.state()).mounted)

    async def test_an_images_disks_are_mounted_and_the_image_made_in_one_call(self) -> None:
        self.shown.show(LAYER, 1, 7)
        disk = messages.LayerDisk(diff_id=LAYER.diff_id, target=1, lun=7)
        for _ in range(2):
            await self.add(*image(LAYER.diff_id), disk)
        self.assertTrue((await self.state()).mounted)

    async def test_the_disks_of_an_image_are_checked_before_anything_is_done(self) -> None:
        far = messages.LayerDisk(diff_id=LAYER.diff_id, target=256, lun=7)
        await self.refused(Code.INVALID_ARGUMENT, self.add(*image(LAYER.diff_id), far))
        nowhere = messages.LayerDisk(diff_id="../..", target=1, lun=7)
        await self.refused(Code.INVALID_ARGUMENT, self.add(*image(LAYER.diff_id), nowhere))

    async def test_a_layer_is_brought_in_two_calls(self) -> None:
        half = PIECE * 4
        self.assertEqual((await self.state()).arrived, 0)
        await self.refused(Code.INVALID_ARGUMENT, self.put(content=LAYER.content[:half]))
        state = await self.state()
        self.assertEqual((state.mounted, state.arrived, state.digest), (False, half, LAYER.digest))
        for _ in range(2):
            await self.put(offset=half, content=LAYER.content[half:])
        state = await self.state()
        self.assertEqual((state.mounted, state.arrived), (True, len(LAYER.content)))
        await self.remove(LAYER.diff_id)
        state = await self.state()
        self.assertEqual((state.mounted, state.arrived), (False, 0))

    async def test_a_lost_connection_keeps_what_arrived(self) -> None:
        size = 1024 * 1024 * 3
        big = layer({"big": b"0123456789abcdef" * (size // 16)})
        stalled: Deferred[None] = Deferred()

        async def requests() -> AsyncIterator[messages.PutLayerRequest]:
            header = messages.PutLayerHeader(diff_id=big.diff_id, size=len(big.content), digest=big.digest)
            yield messages.PutLayerRequest(header=header)
            for at in range(0, size, PIECE):
                yield messages.PutLayerRequest(data=big.content[at : at + PIECE])
            await stalled

        channel = self.agent.channel()
        putting = AgentStub(channel).PutLayer(requests(), timeout=20.0)
        while (await self.state(big)).arrived < BATCH_BYTES:
            pass
        await channel.close()
        await self.assertFailure(putting, Exception)
        there = (await self.state(big)).arrived
        await self.put(big, offset=there, content=big.content[there:])
        self.assertTrue((await self.state(big)).mounted)

    async def test_of_two_nodes_the_newer_brings_it(self) -> None:
        stalled: Deferred[None] = Deferred()
        begun: Deferred[None] = Deferred()

        async def requests() -> AsyncIterator[messages.PutLayerRequest]:
            header = messages.PutLayerHeader(
                diff_id=LAYER.diff_id, size=len(LAYER.content), digest=LAYER.digest
            )
            yield messages.PutLayerRequest(header=header)
            begun.callback(None)
            await stalled

        older = start(self.refused(Code.UNAVAILABLE, self.stub.PutLayer(requests(), timeout=20.0)))
        await begun
        await self.put()
        self.assertIn("newer call", await older)

    async def test_failures_have_their_statuses(self) -> None:
        self.patch(store, "APPEAR_SECONDS", 0.3)
        await self.refused(Code.UNAVAILABLE, self.mount(lun=9))
        await self.refused(Code.OUT_OF_RANGE, self.put(offset=1))
        await self.refused(Code.DATA_LOSS, self.put(content=b"x" * len(LAYER.content)))
        no_layer = Layer(LAYER.diff_id, b"no file system" * 1000)
        await self.refused(Code.FAILED_PRECONDITION, self.put(no_layer))
        await self.refused(Code.FAILED_PRECONDITION, self.add(*image(f"sha256:{1:064x}")))
        too_large = Layer(LAYER.diff_id, b"")
        await self.refused(Code.RESOURCE_EXHAUSTED, self.put(too_large, size=2**40))

    async def test_hostile_headers(self) -> None:
        for fields in (
            {"diff_id": ""},
            {"diff_id": "sha256:../../../../../../../../../../../../../../../../../../../../../etc"},
            {"diff_id": f"{LAYER.diff_id}\n"},
            {"diff_id": "x" * 1_000_000},
            {"digest": "sha256:" + "/" * 64},
            {"digest": ""},
            {"size": 2**64 - 1},
            {"size": 0},
            {"offset": len(LAYER.content) + 1},
            {"offset": 2**63},
        ):
            words = await self.refused(Code.INVALID_ARGUMENT, self.put(**fields))
            self.assertLess(len(words), 1000)
        self.assertFalse((self.base / "files").exists())

    async def test_hostile_requests(self) -> None:
        for disk in ({"diff_id": "../x"}, {"target": 256}, {"lun": 16384}, {"lun": 2**32 - 1}):
            await self.refused(Code.INVALID_ARGUMENT, self.mount(**disk))
        many = [LAYER.diff_id] * 513
        without_layers = messages.AddImageRequest(image_id=LAYER.diff_id, configuration=b"{}")
        for call in (
            self.stub.ListLayers(messages.ListLayersRequest(diff_ids=many), timeout=10.0),
            self.stub.RemoveLayers(messages.RemoveLayersRequest(diff_ids=many), timeout=10.0),
            self.stub.RemoveLayers(messages.RemoveLayersRequest(diff_ids=["/"]), timeout=10.0),
            self.stub.AddImage(messages.AddImageRequest(image_id="x"), timeout=10.0),
            self.stub.AddImage(without_layers, timeout=10.0),
        ):
            await self.refused(Code.INVALID_ARGUMENT, call)
        header = messages.PutLayerHeader(diff_id=LAYER.diff_id, size=3, digest=LAYER.digest)
        for parts in (
            [],
            [messages.PutLayerRequest()],
            [messages.PutLayerRequest(data=b"x")],
            [messages.PutLayerRequest(header=header)] * 2,
            [messages.PutLayerRequest(header=header), messages.PutLayerRequest(data=b"x" * 2_000_000)],
            [messages.PutLayerRequest(header=header), messages.PutLayerRequest(data=b"xxxx")],
        ):
            await self.refused(Code.INVALID_ARGUMENT, self.stub.PutLayer(iter(parts), timeout=10.0))


@needs_root
@needs_programs("mkfs.erofs")
class WholeImageTests(AgentCase):
    async def test_a_provider_of_whole_images_says_so(self) -> None:
        self.assertFalse((await self.stub.Info(messages.InfoRequest(), timeout=10.0)).takes_layers)
        header = messages.PutLayerRequest(header=messages.PutLayerHeader())
        for call in (
            self.stub.ListLayers(messages.ListLayersRequest(), timeout=10.0),
            self.stub.MountLayers(messages.MountLayersRequest(), timeout=10.0),
            self.stub.PutLayer(iter([header]), timeout=10.0),
            self.stub.RemoveLayers(messages.RemoveLayersRequest(), timeout=10.0),
            self.stub.AddImage(messages.AddImageRequest(), timeout=10.0),
        ):
            self.assertIn("oci provider", await self.refused(Code.UNIMPLEMENTED, call))
