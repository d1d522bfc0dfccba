# SPDX-License-Identifier: Apache-2.0
"""The node's image store.

On disk, under one directory of mode 0700::

    images.json     which images there are (index.py)
    blobs/sha256/   configurations and layers by digest, shared by all images; each is whole
    pulls/ID/       the unfinished files of one pull; removed when the daemon starts
    disks/          layers as disks, for the VMs that are shown them (disks.py); made at their first use
    machines/       machines' disks out of images, which VMs boot copies of (machine/)

A blob stays while an image, a pull or an archive needs it, and a layer's disk while an image has that layer.
However the daemon ends, the next one finds complete images, and removes blobs and disks that belong to none.
"""

from __future__ import annotations

import errno
import shutil
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import attrs
from twisted.internet.defer import CancelledError, DeferredLock, DeferredSemaphore
from twisted.logger import Logger

from infranetes.images import archive, index, usage
from infranetes.images.auth import RegistryCredentials
from infranetes.images.config import ImagesConfig
from infranetes.images.disks import BuiltDisk, DiskSource, LayerDisks, Make, stacked, until_landed
from infranetes.images.erofs.build import Builder
from infranetes.images.erofs.limits import Limits
from infranetes.images.index import Image, Record
from infranetes.images.layer_disk import LayerDisk
from infranetes.images.manifest import is_object
from infranetes.images.pull import Puller
from infranetes.images.reference import Reference, parse
from infranetes.images.usage import FsUsage
from infranetes_common.concurrency import IMAGES, Flight, run_in_thread, start
from infranetes_common.errors import (
    ConfigError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.reactors import IReactor

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_FULL = (errno.ENOSPC, errno.EDQUOT)

_Key = tuple[Reference, RegistryCredentials | None, Puller]


@attrs.frozen
class LayerFile:
    """A layer as the registry has it. :ivar compression: gzip, zstd or ""."""

    path: Path
    compression: str


@attrs.frozen
class ImageFiles:
    """The files of an image, lowest layer first.

    :ivar disk: the only one is no layer but a machine's disk. :ivar digest: of that file."""

    layers: tuple[LayerFile, ...]
    disk: bool = False
    digest: str = ""


def _pinned(config: ImagesConfig) -> frozenset[str]:
    return frozenset(str(parse(name)) for name in (*config.pinned, *config.preload))


class ImageStore:
    """Pulls and stores container images. Call `start` first.

    :param directory: used by this store alone.
    :param make_disk: makes a layer's disk.
    """

    machine_images = False

    _log = Logger()

    def __init__(
        self,
        reactor: IReactor,
        directory: Path | str,
        config: ImagesConfig | None = None,
        make_disk: Make | None = None,
    ) -> None:
        self._config = config or ImagesConfig()
        self._reactor = reactor
        self._directory = Path(directory).absolute()
        self._index = self._directory / "images.json"
        self._blobs = self._directory / "blobs" / "sha256"
        self._pulls = self._directory / "pulls"
        self._records: dict[str, Record] = {}
        self._pinned = _pinned(self._config)
        self._in_use: Counter[str] = Counter()  # by digest: how many tasks need the blob or its disk
        self._lock = DeferredLock()  # one change of images.json or of the set of blobs at a time
        self._pull_limit = DeferredSemaphore(self._config.max_parallel_pulls)
        self._puller = Puller(reactor, self._config, self._blobs, self._pulls)
        self._flights: dict[_Key, Flight[Record]] = {}  # pulls under way
        self._builder = Builder(reactor)
        self._disks = LayerDisks(reactor, self._directory / "disks", make_disk or self._make_disk)
        self._making: dict[str, Flight[Sequence[LayerDisk]]] = {}  # by image id: disks being made
        self._beside: list[Callable[[Collection[str]], Awaitable[None]]] = []
        self._ahead = False  # disks were asked for, so those of the next images will be too

    async def start(self) -> None:
        """Read the index, and remove blobs that no image needs.

        :raise ConfigError: the directory can't be used.
        """

        def prepare() -> dict[str, Record]:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._directory.chmod(0o700)
            shutil.rmtree(self._pulls, ignore_errors=True)
            self._pulls.mkdir(mode=0o700, exist_ok=True)
            self._blobs.mkdir(mode=0o700, parents=True, exist_ok=True)
            return index.load(self._index, self._blobs)

        try:
            self._records = await self._thread(prepare)
            await self._disks.start()
        except OSError as e:
            raise ConfigError(f"state_dir: images can't be kept in {self._directory}: {e.strerror}") from None
        await self._collect()
        self._log.info("{count} images in {path}", count=len(self._records), path=str(self._directory))

    def reconfigure(self, config: ImagesConfig) -> None:
        """Pull and pin by `config` from now on.

        Pulls under way end as they began, and how many there may be at once stays as it is.
        """
        self._config = config
        self._pinned = _pinned(config)
        self._puller = Puller(self._reactor, config, self._blobs, self._pulls)

    async def stop(self) -> None:
        """End pulls and the making of disks that are under way. Idempotent."""
        flights = [*self._flights.values()]
        for flight in flights:
            flight.cancel()
        await self._disks.stop()
        for flight in flights:
            await until_landed(flight)
        for making in [*self._making.values()]:
            await until_landed(making)
        await self._builder.stop()

    # ---- What is there -----------------------------------------------------------------------

    def list(self) -> list[Image]:
        """Return every image, sorted by its first name, then id."""
        images = [record.image(self._pinned) for record in self._records.values()]
        return sorted(images, key=lambda i: ((i.repo_tags + i.repo_digests + (i.id,))[0], i.id))

    def resolve(self, name_or_id: str) -> Image:
        """Return the image that a reference, an id or the beginning of an id means.

        :raise NotFound: it is not on this node.
        :raise InvalidArgument: the name is malformed or ambiguous.
        """
        return index.find(self._records, name_or_id).image(self._pinned)

    async def find(self, name_or_id: str) -> Image:
        """Return `resolve`'s answer: everything is known here."""
        return self.resolve(name_or_id)

    def cached(self, image_id: str) -> Image | None:
        """Return the image with this id; None: it is not on this node."""
        record = self._records.get(image_id)
        return None if record is None else record.image(self._pinned)

    async def check(self, image_id: str) -> None:
        """Do nothing: only `remove` removes images from this store."""

    async def config(self, image_id: str) -> bytes:
        """Return the image's configuration, JSON as the registry has it. :raise NotFound: no such image.

        Of an artifact that is a disk it may be anything, and is `{}` if it is no JSON object.
        """
        manifest = self._record(image_id).manifest
        try:
            data = await self._thread(self._blob(manifest.config_digest).read_bytes)
        except OSError:
            raise NotFound(f"image {image_id} is not on this node any more; pull it") from None
        return data if not manifest.disk or is_object(data) else b"{}"

    @property
    def directory(self) -> Path:
        """The directory, where whoever keeps something beside the images (`sweep_beside`) may have it."""
        return self._directory

    @property
    def settings(self) -> ImagesConfig:
        """The configuration that is in force."""
        return self._config

    def files(self, image_id: str) -> ImageFiles:
        """Return the files of an image's layers, which stay while it is there or `held`.

        :raise NotFound: no image has this id.
        """
        manifest = self._record(image_id).manifest
        layers = tuple(LayerFile(self._blob(layer.digest), layer.compression) for layer in manifest.layers)
        return ImageFiles(layers, manifest.disk, "" if not manifest.disk else manifest.layers[0].digest)

    def sweep_beside(self, sweep: Callable[[Collection[str]], Awaitable[None]]) -> None:
        """Have `sweep` called after each change, with the ids of all images that are there or held.

        It removes what was made of others, and does not fail. No image is added or removed meanwhile.
        """
        self._beside.append(sweep)

    async def fs_usage(self) -> FsUsage:
        """Return how much disk the store uses: blobs, layers' disks, and what is unfinished."""
        return await self._thread(usage.of, self._directory)

    async def archive(self, image_id: str, present: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield the image as a tar for `docker load`, in chunks of at most 256 KiB.

        :param present: how many of the lowest layers are left out; the manifest still names them.
        :raise NotFound: no image has this id.
        :raise InvalidArgument: it has fewer layers than `present`.
        """
        record = self._container_image(image_id)
        if not 0 <= present <= len(record.diff_ids):
            raise InvalidArgument(f"image {image_id} has {len(record.diff_ids)} layers, not {present}")
        async with (
            self.held(image_id),
            aclosing(archive.stream(record, self._blobs, present, self._thread)) as chunks,
        ):
            async for chunk in chunks:
                yield chunk

    @asynccontextmanager
    async def held(self, image_id: str) -> AsyncIterator[None]:
        """Keep the image's blobs and disks until the end of the block, also if it is removed meanwhile.

        :raise NotFound: no image has this id.
        """
        record = self._record(image_id)
        digests = self._use({record.id, *record.manifest.blobs, *record.diff_ids})
        try:
            yield
        finally:
            self._in_use.subtract(digests)
            if self._records.get(record.id) is not record:
                await self._collect()

    async def disks(self, image_id: str) -> Sequence[LayerDisk]:
        """Return the image's layers as disks, lowest first, and make those that are missing.

        A layer that the image has several times counts where it is the highest: there it hides the others.
        What has begun goes on if this is cancelled, so that the caller finds it when it asks again. The files
        stay as long as an image has them or is `held`; a VM that is shown one keeps it.

        :raise NotFound: no image has this id.
        :raise FailedPrecondition: it has too many layers, or one that can't become a disk.
        :raise ResourceExhausted: the disk is full.
        :raise DeadlineExceeded: making one took too long.
        :raise Unavailable: the store is stopping, or a blob is not what it was.
        """
        record = self._container_image(image_id)
        self._ahead = True
        flight = self._making.get(record.id)
        if flight is None:
            layers = stacked(record, self._blobs)
            flight = self._making[record.id] = Flight(self._make_disks(record, layers))
        try:
            disks = await flight.join()
        except CancelledError:
            if flight.done:  # by `stop`
                raise Unavailable("the daemon is stopping") from None
            raise
        self._record(image_id)  # raises if the image was removed meanwhile, and its disks with it
        return disks

    def prepare(self, image_id: str) -> None:
        """Begin to make the image's disks. Nobody waits, and `disks` tells what fails."""
        start(self.disks(image_id)).addErrback(
            lambda failure: self._log.debug("disks of {image}: {error}", image=image_id, error=failure.value)
        )

    # ---- Changes -----------------------------------------------------------------------------

    async def pull(self, name: str, auth: RegistryCredentials | None = None) -> Image:
        """Fetch an image, unless the one that is here is what the registry has.

        Equal calls share one pull, which is cancelled when all of them are.

        :raise InvalidArgument: `name` is not a reference.
        :raise NotFound: the registry has no such image, or none for this platform.
        :raise Unauthenticated: or
        :raise PermissionDenied: the registry wants other credentials.
        :raise FailedPrecondition: somebody has to change something; the message says what.
        :raise Unavailable: the registry can't be reached, or what it sends does not match its digest.
        :raise ResourceExhausted: the disk is full.
        """
        asked = parse(name)
        key = (asked, auth, self._puller)
        flight = self._flights.get(key)
        if flight is None or flight.done:
            pulling = start(self._pull(asked, auth))
            flight = self._flights[key] = Flight(pulling)
            pulling.addBoth(self._landed, key, flight)
        try:
            record = await flight.join()
        except CancelledError:
            if flight.done:  # by `stop`
                raise Unavailable("the daemon is stopping") from None
            if not flight.waiters:
                self._flights.pop(key, None)  # another call from now on begins a new pull
                flight.cancel()
                await until_landed(flight)
            raise
        return record.image(self._pinned)

    async def remove(self, name_or_id: str) -> None:
        """Remove the image with all of its names. Idempotent.

        :raise InvalidArgument: the name is malformed or ambiguous.
        """
        try:
            meant = index.find(self._records, name_or_id).id
        except NotFound:
            return

        def without(records: dict[str, Record]) -> dict[str, Record]:
            return {id: record for id, record in records.items() if id != meant}

        await self._change(without, frees=True)
        self._log.info("removed image {image}", image=meant)

    async def _pull(self, asked: Reference, auth: RegistryCredentials | None) -> Record:
        started = self._reactor.seconds()
        used: list[str] = []
        puller = self._puller

        async def use(digests: Iterable[str]) -> None:
            async with self._lock:
                used.extend(self._use(digests))

        await self._pull_limit.acquire()
        try:
            verified = {pair: size for r in self._records.values() for pair, size in r.verified.items()}
            record = await puller.pull(asked, auth, verified, use)
            await self._change(lambda records: index.added(records, record))
        except OSError as e:
            raise self._disk_error(e) from None
        finally:
            self._in_use.subtract(used)
            self._pull_limit.release()
            await self._collect()
        seconds = self._reactor.seconds() - started
        self._log.info("pulled {image} in {seconds:.2f} s", image=str(asked), seconds=seconds)
        if self._ahead and not record.manifest.disk:
            self.prepare(record.id)
        return self._records.get(record.id, record)

    async def _make_disks(self, record: Record, layers: Sequence[DiskSource]) -> Sequence[LayerDisk]:
        try:
            async with self.held(record.id):
                return await self._disks.get(layers)
        except OSError as e:
            raise self._disk_error(e) from None
        finally:
            del self._making[record.id]

    async def _make_disk(self, layer: DiskSource, target: Path) -> BuiltDisk:
        limits = Limits(max_bytes=self._config.max_layer_bytes)
        return await self._builder.build(
            layer.blob, layer.compression, target, layer.diff_id, limits, layer.disks_below
        )

    async def _change(
        self, change: Callable[[dict[str, Record]], dict[str, Record]], frees: bool = False
    ) -> None:
        """Apply `change` to the disk, then to memory, then remove blobs that are no longer needed.

        :param frees: whether it makes room. If the disk is too full to write the index, blobs are removed
            first. A daemon killed in between drops their image when it starts again.
        """
        async with self._lock:
            records = change(self._records)
            try:
                await self._thread(index.save, self._index, [*records.values()])
            except OSError as e:
                if not (frees and e.errno in _FULL):
                    raise self._disk_error(e) from None
                self._records = records
                await self._sweep()
                await self._thread(index.save, self._index, [*records.values()])
            self._records = records
            await self._sweep()

    async def _collect(self) -> None:
        """Remove blobs and disks that nothing needs."""
        async with self._lock:
            await self._sweep()

    async def _sweep(self) -> None:
        """Remove blobs and disks that nothing needs; the lock is held.

        None becomes needed meanwhile: pulls take the lock for that, and all else needs what images need.
        """

        def sweep() -> None:
            for path in self._blobs.iterdir():
                if f"sha256:{path.name}" not in needed:
                    path.unlink(missing_ok=True)

        records = [*self._records.values()]
        self._in_use = +self._in_use
        needed = {*self._in_use, *(digest for record in records for digest in record.manifest.blobs)}
        await self._thread(sweep)
        await self._disks.sweep(
            {*self._in_use, *(digest for record in records for digest in record.diff_ids)}
        )
        for sweep_beside in self._beside:
            await sweep_beside({*self._in_use, *self._records})

    def _use(self, blobs: Iterable[str]) -> Sequence[str]:
        digests = list(blobs)
        self._in_use.update(digests)
        return digests

    def _landed(self, result: None, key: _Key, flight: Flight[Record]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]

    def _disk_error(self, e: OSError) -> Exception:
        if e.errno in _FULL:
            return ResourceExhausted(
                f"the disk of {self._directory} is full; remove images or make room, then call again"
            )
        return FailedPrecondition(f"the image store {self._directory} can't be written: {e.strerror}")

    def _record(self, image_id: str) -> Record:
        record = self._records.get(image_id)
        if record is None:
            raise NotFound(f"image {image_id} is not on this node; pull it first")
        return record

    def _container_image(self, image_id: str) -> Record:
        record = self._record(image_id)
        if record.manifest.disk:
            raise FailedPrecondition(
                f"image {image_id} is the disk of a machine, not a container image; give the pod a "
                'RuntimeClass whose handler has images = "machine"'
            )
        return record

    def _blob(self, digest: str) -> Path:
        return self._blobs / digest.removeprefix("sha256:")

    async def _thread(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        return await run_in_thread(self._reactor, work, *args, purpose=IMAGES)
