# SPDX-License-Identifier: Apache-2.0
"""The images of the node's own runtime, of which VMs are shown the layers: there is no second store.

Names, pulls, credentials and removal are that runtime's. Kept here is what it has no use for: the disks of
layers, by diff id, as long as it lists an image that has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

import attrs
from google.protobuf.message import DecodeError, Message
from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.logger import Logger

from infranetes.delegate.errors import as_error
from infranetes.delegate.layer_source import ILayerSource, LayersMissing, Runtime
from infranetes.images.config import ImagesConfig
from infranetes.images.disks import BuiltDisk, DiskSource, LayerDisks, Make, stacked, until_landed
from infranetes.images.erofs.build import Builder
from infranetes.images.erofs.limits import Limits
from infranetes.images.index import Image, Record
from infranetes.images.layer_disk import LayerDisk
from infranetes.images.manifest import Layer
from infranetes.images.reference import is_digest, parse
from infranetes_common.concurrency import Flight, sleep, start
from infranetes_common.errors import (
    ConfigError,
    FailedPrecondition,
    InfranetesError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from txgrpc import GrpcError

SECONDS = 30.0  # how long the runtime may take to tell what it has
PULL_SECONDS = 1800.0
AGAIN = 2.0  # seconds until a runtime that is not there yet is asked again
SAMPLE = 50  # images, at most, that are looked at to find out whether the runtime keeps layers

M = TypeVar("M", bound=Message)

_BLOBS = Path("/")  # a placeholder: the runtime is asked where a blob is when it is needed
_log = Logger()


class DelegateImages:
    """Implements `Images` of `infranetes.pods.node.context`. Call `start` first.

    :param runtime: makes calls on the runtime's socket. :param directory: used by this object alone.
    :param sweep: seconds between two looks for disks that no image has any more.
    :param make_disk: makes a layer's disk of its file.
    :param refuse: called after each look at the runtime's images, with why VMs can't be made of them;
        "": they can.
    """

    machine_images = False

    def __init__(
        self,
        reactor: IReactor,
        runtime: Runtime,
        source: ILayerSource,
        directory: Path,
        config: ImagesConfig,
        sweep: float = 60.0,
        make_disk: Make | None = None,
        refuse: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._reactor = reactor
        self._runtime = runtime
        self._source = source
        self._directory = directory.absolute()
        self._sweep_seconds = sweep
        self._builder = Builder(reactor)
        self._build = make_disk or self._build_disk
        self._disks = LayerDisks(reactor, self._directory, self._make_disk)
        self._images: dict[str, Image] = {}  # by id: the runtime's last answers
        self._records: dict[str, Record] = {}  # by id: the layers they are made of
        self._layers: dict[str, Layer] = {}  # by digest: the layers of the records
        self._in_use: Counter[str] = Counter()  # by diff id
        self._used: set[str] = set()  # diff ids in use since the look for unused ones began
        self._making: dict[str, Flight[Sequence[LayerDisk]]] = {}  # by image id
        self._refuse = refuse
        self._stopped = False
        self._watching: Deferred[None] = succeed(None)
        self.reconfigure(config)

    async def start(self) -> None:
        """Make the directories. :raise ConfigError: they can't be used."""
        try:
            await self._disks.start()
            await self._source.start()
        except OSError as error:
            raise ConfigError(
                f"state_dir: layers' disks can't be kept in {self._directory}: {error.strerror}"
            ) from None
        self._watching = start(self._watch())
        self._watching.addErrback(lambda failure: failure.trap(CancelledError) and None)

    async def stop(self) -> None:
        """End the making of disks that is under way. Idempotent."""
        self._stopped = True
        self._watching.cancel()
        await self._disks.stop()
        for making in [*self._making.values()]:
            await until_landed(making)
        await self._builder.stop()

    def reconfigure(self, config: ImagesConfig) -> None:
        """Pin images and bound layers by `config` from now on. All else in it is the runtime's own matter."""
        self._pinned = frozenset(str(parse(name)) for name in (*config.pinned, *config.preload))
        self._max_layer_bytes = config.max_layer_bytes

    # ---- Images

    async def find(self, name_or_id: str) -> Image:
        """Return the image that a reference or an id means to the runtime now.

        :raise NotFound: it has no such image. :raise FailedPrecondition: it can't be run in a VM.
        :raise Unavailable: it can't be asked.
        """
        request = cri.ImageStatusRequest(image=cri.ImageSpec(image=name_or_id))
        told = (await self._ask("ImageStatus", request, cri.ImageStatusResponse)).image
        if not told.id:
            raise NotFound(f"image {name_or_id[:300]} is not on this node; pull it first")
        return await self._image(told)

    async def _image(self, told: cri.Image) -> Image:
        id = digest_in(told.id)
        if not id:
            raise FailedPrecondition(
                f"the node's runtime calls an image {told.id[:100]!r}, which is no digest"
            )
        try:
            record = await self._record(id)
        except NotFound as error:
            raise FailedPrecondition(str(error)) from None
        named = attrs.evolve(
            record, tags=frozenset(told.repo_tags), digests=frozenset(told.repo_digests)
        ).image(self._pinned)
        found = attrs.evolve(
            named, size=told.size or named.size, pinned=named.pinned or told.pinned, told_id=told.id
        )
        self._images[found.id] = found
        return found

    def cached(self, image_id: str) -> Image | None:
        """Return what was last told of the image; None: nothing."""
        return self._images.get(image_id)

    async def check(self, image_id: str) -> None:
        """Do nothing: only the runtime removes images."""

    async def config(self, image_id: str) -> bytes:
        """Return the image's configuration, whose digest is its id. :raise NotFound: it is not there."""
        return await self._source.config(image_id)

    async def archive(self, image_id: str, present: int = 0) -> AsyncGenerator[bytes, None]:
        """Fail: what VMs are not shown as layers is not brought into them.

        :raise FailedPrecondition: always.
        """
        raise FailedPrecondition(
            f"image {image_id} can't be brought into a VM whose agent takes no layers: beside another "
            "runtime, VMs need a guest image with conmon and crun"
        )
        yield b""

    @asynccontextmanager
    async def held(self, image_id: str) -> AsyncIterator[None]:
        """Keep the image's disks until the end of the block, also if it is removed meanwhile.

        :raise NotFound: it is not there.
        """
        with self._using((await self._record(image_id)).diff_ids):
            yield

    async def disks(self, image_id: str) -> Sequence[LayerDisk]:
        """Return the image's layers as disks, lowest first, and make those that are missing.

        What has begun goes on if this is cancelled, so that the caller finds it when it asks again.

        :raise NotFound: the image is not there.
        :raise FailedPrecondition: it has too many layers, one that can't become a disk, or not all of them.
        :raise ResourceExhausted: the disk is full.
        :raise Unavailable: the daemon is stopping, or the runtime can't be asked.
        """
        flight = self._making.get(image_id)
        if flight is None:
            flight = self._making[image_id] = Flight(self._make_disks(image_id))
        try:
            return await flight.join()
        except CancelledError:
            if flight.done:  # by `stop`
                raise Unavailable("the daemon is stopping") from None
            raise

    async def pull(self, name: str) -> Image:
        """Have the runtime pull an image, with the credentials that it has itself."""
        request = cri.PullImageRequest(image=cri.ImageSpec(image=name))
        answer = await self._ask("PullImage", request, cri.PullImageResponse, PULL_SECONDS)
        return await self.find(answer.image_ref or name)

    async def refusal(self) -> str:
        """Return why VMs can't be made of the runtime's images: it deletes layers; "": they can.

        This is decided by its content, whatever its configuration says by now: none of the images that were
        looked at has its layers. A single image without them is refused when a container is created.

        :raise Unavailable: it can't be asked.
        """
        if unusable := await self._source.unusable():
            return unusable
        missing = False
        for id in (await self._list())[:SAMPLE]:
            try:
                record = await self._source.image(id)
                await self._source.check(record, [layer.digest for layer in record.manifest.layers])
                return ""
            except LayersMissing as error:
                _log.debug("{error}", error=error)
                missing = True
            except (NotFound, FailedPrecondition) as error:  # removed meanwhile, or not for VMs
                _log.debug("image {image}: {error}", image=id, error=error)
        return self._source.discards if missing else ""

    # ---- Disks

    async def sweep(self) -> None:
        """Remove the disks of layers that no listed image has, and forget what is not listed.

        :raise Unavailable: the runtime can't be asked; nothing is removed.
        """
        self._used.clear()
        needed: set[str] = set()
        listed = set(await self._list())
        for image_id in listed:
            try:
                needed.update((await self._record(image_id)).diff_ids)
            except (NotFound, FailedPrecondition):  # removed meanwhile, or not for VMs
                continue
        for image_id in self._images.keys() | self._records.keys():
            if image_id not in listed and image_id not in self._making:
                self._images.pop(image_id, None)
                self._records.pop(image_id, None)
        layers = [layer for record in self._records.values() for layer in record.manifest.layers]
        self._layers = {layer.digest: layer for layer in layers}
        self._in_use = +self._in_use
        await self._disks.sweep(needed.union(self._in_use, self._used))

    async def _watch(self) -> None:
        """Look whether the runtime keeps layers, as soon as it answers, and from time to time at all."""
        looked = False
        while not self._stopped:
            try:
                self._refuse(await self.refusal())
                if looked:
                    await self.sweep()
                looked = True
            except InfranetesError as error:
                _log.debug("the images of the node's runtime were not listed: {error}", error=error)
            except OSError as error:
                _log.warn("{path}: {error}", path=str(self._directory), error=error.strerror)
            if not self._stopped:  # the failure may be a call that `stop` cancelled
                pause = self._sweep_seconds if looked else min(AGAIN, self._sweep_seconds)
                await sleep(self._reactor, pause)

    async def _record(self, image_id: str) -> Record:
        return self._records.get(image_id) or await self._read(image_id)

    async def _read(self, image_id: str) -> Record:
        record = self._records[image_id] = await self._source.image(image_id)
        self._layers.update({layer.digest: layer for layer in record.manifest.layers})
        return record

    async def _make_disks(self, image_id: str) -> Sequence[LayerDisk]:
        try:
            record = await self._record(image_id)
            if await self._lacking(record):
                record = await self._read(image_id)  # it may have been pulled anew, with other blobs
            sources = stacked(record, _BLOBS)
            with self._using(record.diff_ids):
                lacking = {_digest(source) for source in await self._lacking(record)}
                if not lacking:
                    return await self._disks.get(sources)
                async with self._source.kept(lacking):
                    await self._source.check(record, lacking)
                    return await self._disks.get(sources)
        except OSError as error:
            raise ResourceExhausted(
                f"layers' disks can't be written to {self._directory}: {error.strerror}; make room there, "
                "then call again"
            ) from None
        finally:
            del self._making[image_id]

    async def _lacking(self, record: Record) -> Sequence[DiskSource]:
        return await self._disks.lacking(stacked(record, _BLOBS))

    async def _make_disk(self, wanted: DiskSource, target: Path) -> BuiltDisk:
        layer = self._layers[_digest(wanted)]
        if not layer.compression and layer.size > self._max_layer_bytes:  # before it is in a file
            raise FailedPrecondition(
                f"layer {layer.digest} has {layer.size} bytes; the limit is {self._max_layer_bytes} "
                "(images.max_layer_bytes)"
            )
        async with self._source.file(layer) as path:
            return await self._build(attrs.evolve(wanted, blob=path), target)

    async def _build_disk(self, layer: DiskSource, target: Path) -> BuiltDisk:
        limits = Limits(max_bytes=self._max_layer_bytes)
        return await self._builder.build(
            layer.blob, layer.compression, target, layer.diff_id, limits, layer.disks_below
        )

    @contextmanager
    def _using(self, diff_ids: Collection[str]) -> Iterator[None]:
        """Keep these layers' disks until the end of the block."""
        self._in_use.update(diff_ids)
        self._used.update(diff_ids)
        try:
            yield
        finally:
            self._in_use.subtract(diff_ids)

    # ---- The runtime's answers

    async def _list(self) -> Sequence[str]:
        answer = await self._ask("ListImages", cri.ListImagesRequest(), cri.ListImagesResponse)
        return [id for told in answer.images if (id := digest_in(told.id))]

    async def _ask(self, rpc: str, request: Message, response_class: type[M], seconds: float = SECONDS) -> M:
        payload = request.SerializeToString()
        try:
            answer = await self._runtime.call(f"/runtime.v1.ImageService/{rpc}", payload, timeout=seconds)
            return response_class.FromString(answer)
        except GrpcError as error:
            raise as_error("the node's runtime", error) from None
        except DecodeError:
            raise Unavailable(f"the answer of the node's runtime to {rpc} can't be read") from None


def digest_in(told_id: str) -> str:
    """Return the digest that a runtime's id of an image is: CRI-O leaves `sha256:` out. "": it is none."""
    digest = told_id if ":" in told_id else f"sha256:{told_id}"
    return digest if is_digest(digest) else ""


def _digest(wanted: DiskSource) -> str:
    """Return the digest of the layer's blob, which stands for the file that it is not yet known to be."""
    return f"sha256:{wanted.blob.name}"
