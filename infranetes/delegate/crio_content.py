# SPDX-License-Identifier: Apache-2.0
"""Images' content as CRI-O keeps it: what an image is made of, and its layers as files."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import attrs
from google.protobuf.message import DecodeError
from zope.interface import implementer

from infranetes.delegate.containers_storage import AGAIN, ContainersStorage
from infranetes.delegate.errors import as_error
from infranetes.delegate.layer_files import thd_clear, thd_create
from infranetes.delegate.layer_source import ILayerSource, LayersMissing, Runtime
from infranetes.images import manifest
from infranetes.images.index import Record
from infranetes.images.manifest import Layer, Manifest
from infranetes_common.concurrency import IMAGES, run_in_thread
from infranetes_common.errors import FailedPrecondition, NotFound, Unavailable
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from txgrpc import GrpcError

T = TypeVar("T")
V = TypeVar("V")

SECONDS = 30.0  # how long CRI-O may take to tell where its images are
PARTIAL = (
    'CRI-O does not keep all of the layers that VMs are made of: set enable_partial_images = "false" among '
    "pull_options of its storage.conf, restart it, and pull the images again"
)
_FS_INFO = "/runtime.v1.ImageService/ImageFsInfo"


@implementer(ILayerSource)
class CrioContent:
    """Reads images out of CRI-O's containers/storage. Call `start` first.

    The digest of a layer is its diff id here, as CRI-O keeps it unpacked: its tar is put together while it is
    needed.

    :param runtime: for calls on its socket. :param directory: for such files; used by this object alone.
    :param platform: that images have to be for, as OS/ARCHITECTURE.
    """

    discards = PARTIAL

    def __init__(self, reactor: IReactor, runtime: Runtime, directory: Path, platform: str) -> None:
        self._reactor = reactor
        self._runtime = runtime
        self._directory = directory
        self._platform = platform
        self._found: ContainersStorage | None = None

    async def start(self) -> None:
        """See `ILayerSource.start`."""
        await run_in_thread(self._reactor, thd_clear, self._directory, purpose=IMAGES)

    async def unusable(self) -> str:
        """Look again where CRI-O has its images; return why that is of no use, if so."""
        self._found = None
        place = await self._place()
        try:
            self._found = ContainersStorage.of(place)
        except FailedPrecondition as error:
            return str(error)
        if not await run_in_thread(self._reactor, Path(place).is_dir, purpose=IMAGES):
            return (
                f"CRI-O stores its images in {place}, which this daemon can't see: "
                "make that directory visible to it"
            )
        return ""

    async def image(self, image_id: str) -> Record:
        """Return what the image is made of, without any name.

        :raise NotFound: CRI-O does not have it. :raise FailedPrecondition: it can't be run in a VM.
        :raise InfranetesError: CRI-O can't be asked now, or what it has is damaged."""
        storage = await self._storage()
        data = await self._thread(storage.thd_manifest, image_id)
        described = manifest.read(data, self._platform, image_id)
        if not isinstance(described, Manifest) or described.config_digest != image_id:
            raise LayersMissing(f"image {image_id} is in CRI-O's storage without its manifest. {PARTIAL}")
        config = manifest.read_config(await self.config(image_id), described, image_id)
        manifest.require_platform(config, self._platform, image_id)
        stored = await self._thread(storage.thd_layers, config.diff_ids)
        sizes = tuple(stored[each].size if each in stored else 0 for each in config.diff_ids)
        layers = tuple(Layer(each, size, "") for each, size in zip(config.diff_ids, sizes, strict=True))
        return Record(attrs.evolve(described, layers=layers), config.diff_ids, sizes, config.user)

    async def config(self, image_id: str) -> bytes:
        """Return the configuration, JSON whose digest is the image's id. :raise NotFound: no image."""
        return await self._thread((await self._storage()).thd_config, image_id)

    def kept(self, digests: Collection[str]) -> AbstractAsyncContextManager[None]:
        """Do nothing: CRI-O has no way to ask for that. What is removed meanwhile is not found."""
        return nullcontext()

    async def check(self, record: Record, digests: Collection[str]) -> None:
        """Check that these layers of the image are there.

        :raise NotFound: the image is not there any more.
        :raise LayersMissing: they are not, although the image is."""
        storage = await self._storage()
        found = await self._thread(storage.thd_layers, digests)
        for digest in digests:
            if digest not in found:
                await self.config(record.id)
                raise LayersMissing(
                    f"image {record.id} is on this node without its layer {digest}, of which a VM's disk has "
                    f"to be made; {AGAIN}. If that does not help: {PARTIAL}"
                )

    @asynccontextmanager
    async def file(self, layer: Layer) -> AsyncIterator[Path]:
        """Have a layer's tar as a file until the end of the block.

        :raise NotFound: it is not there. :raise DataLoss: it is not what it was."""
        storage = await self._storage()
        found = await self._thread(storage.thd_layers, [layer.digest])
        if layer.digest not in found:
            raise NotFound(f"layer {layer.digest} is not in CRI-O's storage {storage.root} any more; {AGAIN}")
        path, stop = self._directory / layer.digest.removeprefix("sha256:"), threading.Event()

        def write() -> None:
            descriptor = thd_create(path)
            try:
                storage.thd_write(found[layer.digest], descriptor, stop)
            finally:
                os.close(descriptor)

        try:
            await run_in_thread(self._reactor, write, on_cancel=stop.set, purpose=IMAGES)
            yield path
        finally:
            await run_in_thread(self._reactor, path.unlink, True, purpose=IMAGES)

    async def _thread(self, work: Callable[[V], T], value: V) -> T:
        return await run_in_thread(self._reactor, work, value, purpose=IMAGES)

    async def _storage(self) -> ContainersStorage:
        if self._found is None:
            self._found = ContainersStorage.of(await self._place())
        return self._found

    async def _place(self) -> str:
        """Return the directory of images, as ImageFsInfo has it."""
        try:
            answer = await self._runtime.call(_FS_INFO, b"", timeout=SECONDS)
            told = cri.ImageFsInfoResponse.FromString(answer).image_filesystems
        except GrpcError as error:
            raise as_error("CRI-O", error) from None
        except DecodeError:
            raise Unavailable("CRI-O's answer to ImageFsInfo can't be read") from None
        if not told:
            raise Unavailable("CRI-O does not say where it stores its images")
        return told[0].fs_id.mountpoint
