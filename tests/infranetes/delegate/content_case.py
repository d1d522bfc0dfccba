# SPDX-License-Identifier: Apache-2.0
"""A node's runtime, and its images that VMs can use."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes.delegate.containerd_api import ContainerdApi
from infranetes.delegate.containerd_content import ContainerdContent
from infranetes.delegate.images import DelegateImages
from infranetes.delegate.layer_source import ILayerSource, Runtime
from infranetes.images import ImagesConfig, LayerDisk
from infranetes.images.disks import BuiltDisk, DiskSource
from infranetes.images.manifest import host_platform
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from infranetes_common.wire.cri_rpcs import ImageStub
from tests.harness.needs import needs_mounts
from tests.support import containerd
from tests.support.oci import BuiltImage, BuiltIndex
from tests.support.registry import Registry
from txgrpc import Channel
from txgrpc.channel import Backoff
from txgrpc.raw import RawStub

reactor = installed()


class Images(DelegateImages):
    """Instrumented. :ivar made: diff ids. :ivar gate: what making a disk waits for. :ivar told: refusals."""

    def __init__(self, runtime: Runtime, source: ILayerSource, directory: Path) -> None:
        self.told: list[str] = []
        super().__init__(
            reactor, runtime, source, directory, ImagesConfig(), 3600.0, self._watched, self.told.append
        )
        self.made: list[str] = []
        self.gate: Deferred[None] = succeed(None)
        self.begun: Deferred[None] = Deferred()

    async def _watched(self, layer: DiskSource, target: Path) -> BuiltDisk:
        self.made.append(layer.diff_id)
        if not self.begun.called:
            self.begun.callback(None)
        waiting: Deferred[None] = Deferred()
        self.gate.chainDeferred(waiting)
        await waiting
        return await self._build_disk(layer, target)


class ImagesCase(TestCase):
    """A runtime, and its images as a new daemon has them."""

    timeout = 400

    async def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="delegate-images-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.runtime = await self.begin()
        self.images = await self.started()

    async def begin(self) -> Runtime:
        """Start the runtime and everything that it needs."""
        raise NotImplementedError

    def source(self) -> ILayerSource:
        """Return the source of layers: where the runtime keeps the content of images."""
        raise NotImplementedError

    async def started(self) -> Images:
        """Return the images as a new daemon has them."""
        images = Images(self.runtime, self.source(), self.directory / "disks")
        await images.start()
        self.addCleanup(lambda: Deferred.fromCoroutine(images.stop()))
        return images

    async def pulled(self, name: str, built: BuiltImage | BuiltIndex, tag: str = "1") -> str:
        """Have the runtime pull an image. Return its reference."""
        raise NotImplementedError

    def remove(self, name: str) -> Deferred[Any]:
        """Have the runtime remove an image."""
        raise NotImplementedError

    def spelled(self, image_id: str) -> str:
        """Return an image's id in the runtime's notation."""
        return image_id

    def on_disk(self) -> set[str]:
        """Return the diff ids of the layers that have a disk."""
        names = {path.name.partition(".")[0] for path in (self.directory / "disks" / "sha256").iterdir()}
        return {f"sha256:{name}" for name in names}

    def assert_right(self, found: Sequence[LayerDisk], diff_ids: Sequence[str]) -> None:
        """Check that these are the layers' disks, in this order, and that their metadata is right."""
        self.assertEqual([disk.diff_id for disk in found], list(diff_ids))
        for disk in found:
            content = disk.path.read_bytes()
            self.assertEqual(len(content), disk.size)
            self.assertEqual(f"sha256:{hashlib.sha256(content).hexdigest()}", disk.digest)


class SocketCase(ImagesCase):
    """A runtime that is a process, with a registry.

    :ivar stub: for calls of its images."""

    async def begin(self) -> Runtime:
        self.registry = await deferToThread(Registry().start)
        self.addCleanup(self.registry.stop)
        endpoint = UNIXClientEndpoint(reactor, str(await self.begin_process()))
        self.channel = Channel(reactor, endpoint, backoff=Backoff(first=0.01, most=0.05))
        self.addCleanup(self.channel.close)
        self.stub = ImageStub(self.channel)
        return RawStub(self.channel)

    async def begin_process(self) -> Path:
        """Start the runtime. Return its socket."""
        raise NotImplementedError

    async def pulled(self, name: str, built: BuiltImage | BuiltIndex, tag: str = "1") -> str:
        """Have the runtime pull an image. Return its reference."""
        reference = await deferToThread(self.registry.push, name, tag, built)
        await self.stub.PullImage(cri.PullImageRequest(image=cri.ImageSpec(image=reference)), timeout=180)
        return reference

    def remove(self, name: str) -> Deferred[Any]:
        request = cri.RemoveImageRequest(image=cri.ImageSpec(image=name))
        removal: Deferred[Any] = self.stub.RemoveImage(request, timeout=180)
        return removal


@needs_mounts
class ContentCase(SocketCase):
    """containerd.

    :cvar discards: whether it deletes layers that it has unpacked."""

    discards = False

    async def begin_process(self) -> Path:
        self.containerd = containerd.Containerd(self.discards)
        self.addCleanup(deferToThread, self.containerd.stop)
        await deferToThread(self.containerd.start)
        return self.containerd.socket

    async def begin(self) -> Runtime:
        runtime = await super().begin()
        self.api = self.make_api()
        return runtime

    def make_api(self) -> ContainerdApi:
        return ContainerdApi(reactor, RawStub(self.channel))

    def source(self) -> ILayerSource:
        return ContainerdContent(reactor, self.api, self.directory / "copies", host_platform())
