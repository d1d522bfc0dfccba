# SPDX-License-Identifier: Apache-2.0
"""Images' content as containerd keeps it: what an image is made of, and its layers as files."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from zope.interface import implementer

from infranetes.delegate.containerd_api import AGAIN, ContainerdApi
from infranetes.delegate.layer_files import thd_clear, thd_create
from infranetes.delegate.layer_source import OTHER, ILayerSource, LayersMissing
from infranetes.images import manifest
from infranetes.images.index import Record
from infranetes.images.manifest import MAX_CONFIG_BYTES, MAX_MANIFEST_BYTES, Layer, Manifest
from infranetes_common.concurrency import IMAGES, run_in_thread
from infranetes_common.errors import DataLoss, NotFound, Unimplemented
from infranetes_common.reactors import IReactor

MAX_MANIFESTS = 64  # the most manifests of one image that are looked at
UNPACKED = 3  # a layer's estimated size as a disk, in multiples of its compressed size
DISCARDED = (
    "containerd deletes the layers that VMs are made of: set discard_unpacked_layers = false in its "
    "configuration, restart it, and pull the images again"
)


@implementer(ILayerSource)
class ContainerdContent:
    """Reads images out of containerd's content store. Call `start` first.

    Layers are read where containerd has them as files; what it keeps elsewhere is copied while it is needed.

    :param directory: for such copies; used by this object alone.
    :param platform: that images have to be for, as OS/ARCHITECTURE.
    """

    discards = DISCARDED

    def __init__(self, reactor: IReactor, api: ContainerdApi, directory: Path, platform: str) -> None:
        self._reactor = reactor
        self._api = api
        self._directory = directory
        self._platform = platform

    async def start(self) -> None:
        """See `ILayerSource.start`."""
        await run_in_thread(self._reactor, thd_clear, self._directory, purpose=IMAGES)

    async def unusable(self) -> str:
        """Return that the runtime is not containerd; "": it is."""
        try:
            await self._api.root()
        except Unimplemented:
            return OTHER
        return ""

    async def image(self, image_id: str) -> Record:
        """Return what the image is made of, without any name.

        :raise NotFound: containerd does not have it. :raise FailedPrecondition: it can't be run in a VM.
        :raise InfranetesError: containerd can't be asked now, or what it says is damaged.
        """
        found = await self._manifest(await self._api.target(image_id), image_id)
        data = await self.config(image_id)
        config = manifest.read_config(data, found, image_id)
        manifest.require_platform(config, self._platform, image_id)
        unpacked = tuple(UNPACKED * layer.size for layer in found.layers)
        return Record(found, config.diff_ids, unpacked, config.user)

    async def config(self, image_id: str) -> bytes:
        """Return the image's configuration, whose digest is its id. :raise NotFound: it is not there."""
        return await self._api.read(image_id, MAX_CONFIG_BYTES)

    def kept(self, digests: Collection[str]) -> AbstractAsyncContextManager[None]:
        """Keep blobs from being removed until the end of the block, if they are there in its beginning."""
        return self._api.leased(digests)

    async def check(self, record: Record, digests: Collection[str]) -> None:
        """Check that these layers of the image are there.

        :raise NotFound: the image is not there any more.
        :raise LayersMissing: they are not, although the image is.
        """
        for digest in digests:
            try:
                await self._api.size(digest)
            except NotFound:
                await self._api.target(record.id)
                raise LayersMissing(
                    f"image {record.id} is on this node without its layer {digest}, of which a VM's disk has "
                    f"to be made; {AGAIN}. If that does not help: {DISCARDED}"
                ) from None

    @asynccontextmanager
    async def file(self, layer: Layer) -> AsyncIterator[Path]:
        """Have a layer as a file until the end of the block. Its blob is `kept` meanwhile.

        :raise NotFound: it is not there. :raise DataLoss: it is not what it was.
        """
        root, name = await self._api.root(), layer.digest.removeprefix("sha256:")
        path = self._directory / name if root is None else root / "blobs" / "sha256" / name
        if root is not None and await run_in_thread(self._reactor, _thd_has, path, layer, purpose=IMAGES):
            yield path
            return
        copy = self._directory / name
        try:
            await self._copy(layer, copy)
            yield copy
        finally:
            await run_in_thread(self._reactor, copy.unlink, True, purpose=IMAGES)

    async def _copy(self, layer: Layer, copy: Path) -> None:
        async def write(part: bytes) -> None:
            await run_in_thread(self._reactor, _thd_append, descriptor, part, purpose=IMAGES)

        descriptor = await run_in_thread(self._reactor, thd_create, copy, purpose=IMAGES)
        try:
            await self._api.download(layer.digest, layer.size, write)
        finally:
            await run_in_thread(self._reactor, os.close, descriptor, purpose=IMAGES)

    async def _manifest(self, top: str, image_id: str) -> Manifest:
        """Return the manifest, of those that `top` lists, whose configuration is the image's.

        containerd has chosen it among those for several platforms, and fetched no other's content."""
        waiting, seen = deque([top]), {top}
        while waiting:
            digest = waiting.popleft()
            try:
                data = await self._api.read(digest, MAX_MANIFEST_BYTES)
            except NotFound:
                continue
            config, listed = manifest.outline(data, image_id)
            if config == image_id and isinstance(
                read := manifest.read(data, self._platform, image_id), Manifest
            ):
                return read
            for each in listed:
                if each not in seen and len(seen) < MAX_MANIFESTS:
                    seen.add(each)
                    waiting.append(each)
        raise NotFound(f"the manifest of image {image_id} is not in containerd's content store; {AGAIN}")


def _thd_has(path: Path, layer: Layer) -> bool:
    """Return whether the file is the blob, by its size. :raise DataLoss: it has another one."""
    try:
        found = path.lstat()
    except OSError:  # this daemon does not see the place
        return False
    if found.st_size != layer.size:
        raise DataLoss(f"{path} has {found.st_size} bytes, the layer {layer.size}; {AGAIN}")
    return True


def _thd_append(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
