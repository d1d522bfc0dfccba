"""The node's image store.

On disk, under one directory of mode 0700::

    images.json     which images there are (index.py)
    blobs/sha256/   configurations and layers by digest, shared by all images; each is whole
    pulls/ID/       what one running pull has in parts; emptied when the daemon starts

A blob stays while an image, a running pull or a running archive needs it. Whatever ends the daemon,
the next one finds images that are complete, and removes what belongs to none.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredLock, DeferredSemaphore
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.images import archive, index
from infranetes.images.auth import Credentials
from infranetes.images.config import ImagesConfig
from infranetes.images.index import Image, Record
from infranetes.images.pull import Puller
from infranetes.images.reference import Reference, parse
from infranetes.threads import in_thread, settled
from infranetes_common.errors import (
    ConfigError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)

_FULL = (errno.ENOSPC, errno.EDQUOT)


@attrs.frozen
class FsUsage:
    """What the image store takes."""

    timestamp_nanos: int  # since 1970 UTC
    path: str
    used_bytes: int
    inodes_used: int


@attrs.define(eq=False)
class _Flight:
    """One pull under way and everyone who waits for it."""

    task: Deferred[Record]
    waiters: set[Deferred[Record]] = attrs.field(factory=set)


class ImageStore:
    """Pulls, keeps and hands out images. One instance per directory; `start` first.

    :param reactor: processes, threads and time. :param directory: kept by this store alone.
    """

    boots = False  # its images are no machines

    _log = Logger()

    def __init__(self, reactor: Any, directory: Path | str, config: ImagesConfig | None = None) -> None:
        self._config = config or ImagesConfig()
        self._reactor = reactor
        self._directory = Path(directory).absolute()
        self._index = self._directory / "images.json"
        self._blobs = self._directory / "blobs" / "sha256"
        self._pulls = self._directory / "pulls"
        self._records: dict[str, Record] = {}
        self._pinned = frozenset(str(parse(name)) for name in (*self._config.pinned, *self._config.preload))
        self._in_use: Counter[str] = Counter()  # digests that pulls and archives need
        self._lock = DeferredLock()  # one change of images.json or of the set of blobs at a time
        self._places = DeferredSemaphore(self._config.max_parallel_pulls)
        self._puller = Puller(reactor, self._config, self._blobs, self._pulls)
        self._flights: dict[tuple[Reference, Credentials | None], _Flight] = {}

    async def start(self) -> None:
        """Read what is there and remove what no image needs.

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
        except OSError as e:
            raise ConfigError(f"state_dir: images can't be kept in {self._directory}: {e.strerror}") from None
        await self._collect()
        self._log.info("{count} images in {path}", count=len(self._records), path=str(self._directory))

    async def stop(self) -> None:
        """End pulls that are under way. Twice is once."""
        flights = [*self._flights.values()]
        for flight in flights:
            flight.task.cancel()
            for waiter in [*flight.waiters]:
                waiter.errback(Unavailable("the daemon is stopping"))
        for flight in flights:
            await settled(flight.task)

    # ---- What is there -----------------------------------------------------------------------

    def list(self) -> list[Image]:
        """Every image, sorted by its first name, then id."""
        images = [record.image(self._pinned) for record in self._records.values()]
        return sorted(images, key=lambda i: ((i.repo_tags + i.repo_digests + (i.id,))[0], i.id))

    def resolve(self, name_or_id: str) -> Image:
        """The image that a reference, an id or the beginning of one id means.

        :raise NotFound: not on this node. :raise InvalidArgument: malformed or ambiguous.
        """
        return index.find(self._records, name_or_id).image(self._pinned)

    async def config(self, image_id: str) -> bytes:
        """The image's configuration: JSON as the registry has it.

        :raise NotFound: no image has this id.
        """
        path = self._blob(self._record(image_id).id)
        try:
            data: bytes = await self._thread(path.read_bytes)
        except OSError:
            raise NotFound(f"image {image_id} is not on this node any more; pull it") from None
        return data

    async def fs_usage(self) -> FsUsage:
        """What the store takes on its disk, parts of running pulls included."""

        def walk() -> tuple[int, int]:
            used, inodes = 0, 0
            for parent, directories, files in os.walk(self._directory):
                for name in (*directories, *files):
                    try:
                        used += os.lstat(os.path.join(parent, name)).st_blocks * 512
                    except FileNotFoundError:
                        continue
                    inodes += 1
            return used, inodes

        used, inodes = await self._thread(walk)
        return FsUsage(time.time_ns(), str(self._directory), used, inodes)

    async def archive(self, image_id: str, present: int = 0) -> AsyncIterator[bytes]:
        """The image as a tar for `docker load`, in pieces of at most 256 KiB.

        :param present: so many of the lowest layers are left out; the manifest names them.
        :raise NotFound: no image has this id. :raise InvalidArgument: it has fewer layers.
        """
        record = self._record(image_id)
        if not 0 <= present <= len(record.diff_ids):
            raise InvalidArgument(f"image {image_id} has {len(record.diff_ids)} layers, not {present}")
        digests = self._use(record.manifest.blobs)
        pieces: Any = archive.stream(record, self._blobs, present, self._thread)
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()
            self._in_use.subtract(digests)
            if self._records.get(record.id) is not record:
                await self._collect()

    # ---- Changes -----------------------------------------------------------------------------

    async def pull(self, name: str, auth: Credentials | None = None) -> Image:
        """Fetch an image, or find that the one that is here is still what the registry has.

        The same pull asked for twice is made once; it ends when everyone who asked is cancelled.

        :raise InvalidArgument: `name` is no reference.
        :raise NotFound: the registry has no such image, or none for this platform.
        :raise Unauthenticated: :raise PermissionDenied: the registry wants other credentials.
        :raise FailedPrecondition: a person has to change something; the message says what.
        :raise Unavailable: the registry can't be reached or sends what it did not promise.
        :raise ResourceExhausted: the disk is full.
        """
        asked = parse(name)
        key = (asked, auth)
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(Deferred.fromCoroutine(self._pull(asked, auth)))
            flight.task.addBoth(self._landed, key, flight)
        waiter: Deferred[Record] = Deferred()
        flight.waiters.add(waiter)
        try:
            record = await waiter
        except CancelledError:
            flight.waiters.discard(waiter)
            if not flight.waiters:
                self._flights.pop(key, None)  # whoever asks from now on starts anew
                flight.task.cancel()
                await settled(flight.task)
            raise
        return record.image(self._pinned)

    async def remove(self, name_or_id: str) -> None:
        """Forget the image under all of its names. Not here: nothing to do.

        :raise InvalidArgument: malformed or ambiguous.
        """
        try:
            meant = index.find(self._records, name_or_id).id
        except NotFound:
            return

        def without(records: dict[str, Record]) -> dict[str, Record]:
            return {id: record for id, record in records.items() if id != meant}

        await self._change(without, frees=True)
        self._log.info("removed image {image}", image=meant)

    async def _pull(self, asked: Reference, auth: Credentials | None) -> Record:
        started = self._reactor.seconds()
        used: list[str] = []

        async def use(digests: Iterable[str]) -> None:
            await self._lock.run(lambda: used.extend(self._use(digests)))

        await self._places.acquire()
        try:
            verified = {pair: size for r in self._records.values() for pair, size in r.verified.items()}
            record = await self._puller.pull(asked, auth, verified, use)
            await self._change(lambda records: index.added(records, record))
        except OSError as e:
            raise self._disk_error(e) from None
        finally:
            self._in_use.subtract(used)
            self._places.release()
            await self._collect()
        seconds = self._reactor.seconds() - started
        self._log.info("pulled {image} in {seconds:.2f} s", image=str(asked), seconds=seconds)
        return self._records.get(record.id, record)

    async def _change(
        self, change: Callable[[dict[str, Record]], dict[str, Record]], frees: bool = False
    ) -> None:
        """Apply `change` to disk, then to memory, then remove blobs that nothing needs any more.

        :param frees: it makes room. On a full disk, where there is none to write that there shall be
            more, blobs go first; killed before the file is written, the next start drops their image.
        """

        async def body() -> None:
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

        await self._lock.run(lambda: Deferred.fromCoroutine(body()))

    async def _collect(self) -> None:
        """Remove blobs that nothing needs."""
        await self._lock.run(lambda: Deferred.fromCoroutine(self._sweep()))

    async def _sweep(self) -> None:
        """`_collect` for those who have the lock. Nothing comes into need meanwhile: pulls take the lock
        for that, and archives need what an image needs."""

        def sweep() -> None:
            for path in self._blobs.iterdir():
                if f"sha256:{path.name}" not in needed:
                    path.unlink(missing_ok=True)

        needed = {d for record in self._records.values() for d in record.manifest.blobs}
        self._in_use = +self._in_use
        needed.update(self._in_use)
        await self._thread(sweep)

    def _use(self, blobs: Iterable[str]) -> Sequence[str]:
        digests = list(blobs)
        self._in_use.update(digests)
        return digests

    def _landed(self, result: Any, key: Any, flight: _Flight) -> None:
        """Tell everyone who waits; what nobody waits for is not an unhandled error."""
        if self._flights.get(key) is flight:
            del self._flights[key]
        for waiter in list(flight.waiters):
            if not waiter.called:
                if isinstance(result, Failure):
                    waiter.errback(result)
                else:
                    waiter.callback(result)

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

    def _blob(self, digest: str) -> Path:
        return self._blobs / digest.removeprefix("sha256:")

    async def _thread(self, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return await in_thread(self._reactor, work, *args, **options)
