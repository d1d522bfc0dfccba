# SPDX-License-Identifier: Apache-2.0
"""The disks of the node's layers: each made once, kept beside the blobs, shared by all images and VMs.

On disk, under one directory::

    sha256/HEX.FORMAT       the disk of the layer with this diff id; never written to again
    sha256/HEX-HEX.FORMAT   that of a layer that takes something from the layers below: files to which it has
                            hard links, attributes of directories: the second part stands for those layers,
                            which may be none
    sha256/HEX.FORMAT.json  what it was when it was made (`_Made`), by which a change is found
    new/HEX                 a disk that is being made; removed when the daemon starts

A disk counts once it is recorded. Whenever it is wanted, its inode, size and time of change are compared with
the record, which costs nothing and finds whatever was written or put in its place; then it is made again, as
another file, so that VMs that have the old one are not disturbed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar, TypeVarTuple

import attrs
import cattrs
from twisted.internet.defer import DeferredSemaphore
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.images.index import Record
from infranetes.images.layer_disk import LayerDisk, NeedsBelow
from infranetes.images.manifest import MAX_LAYERS
from infranetes_common.concurrency import (
    IMAGES,
    Flight,
    replace_file,
    run_in_thread,
    settled,
    until_ended,
)
from infranetes_common.errors import FailedPrecondition, ResourceExhausted, Unavailable
from infranetes_common.reactors import IReactor

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

FORMAT = 2
"""Raised by each change of the builder that makes other bytes of a layer; older files are removed."""

MAX_PARALLEL = 4
_UPON = re.compile("-[0-9a-f]{64}")  # the part of `Source.upon` that stands for the layers below


@attrs.frozen
class DiskSource:
    """The source of a layer's disk.

    :ivar diff_id: sha256: and 64 hex digits of the uncompressed tar.
    :ivar blob: the layer as the registry has it.
    :ivar compression: gzip, zstd or "".
    :ivar unpacked: bytes of the uncompressed tar.
    :ivar below: the diff ids of the layers below, lowest first.
    :ivar disks_below: their disks; None: the layer may do without them.
    """

    diff_id: str
    blob: Path
    compression: str
    unpacked: int
    below: tuple[str, ...] = ()
    disks_below: tuple[Path, ...] | None = None

    @property
    def upon(self) -> str:
        """What its disk is called if that depends on the layers below."""
        return f"{self.diff_id}-{hashlib.sha256(' '.join(self.below).encode()).hexdigest()}"


def stacked(record: Record, blobs: Path) -> list[DiskSource]:
    """Return what the image's file system is stacked from, lowest first.

    Of equal layers the highest counts: whatever the others would show, it shows or hides.

    :raise FailedPrecondition: they are too many.
    """
    layers = zip(record.diff_ids, record.manifest.layers, record.unpacked, strict=True)
    sources: dict[str, DiskSource] = {}
    for index, (diff_id, layer, unpacked) in reversed([*enumerate(layers)]):
        blob = blobs / layer.digest.removeprefix("sha256:")
        source = DiskSource(diff_id, blob, layer.compression, unpacked, record.diff_ids[:index])
        sources.setdefault(diff_id, source)
    if len(sources) > MAX_LAYERS:
        raise FailedPrecondition(
            f"image {record.id} has {len(sources)} layers, a VM can stack {MAX_LAYERS}; build it with fewer"
        )
    return [*reversed(sources.values())]


class BuiltDisk(Protocol):
    """A file system that was made: its size in bytes, and sha256:... of them."""

    @property
    def size(self) -> int: ...

    @property
    def digest(self) -> str: ...


Make = Callable[[DiskSource, Path], Awaitable[BuiltDisk]]
"""Makes a layer's file system at a path where nothing is: whole and synced, within a time of its own choice.

When it fails, or has been cancelled and ends, nothing is left that works on.
"""


@attrs.frozen
class _Made:
    """A disk as it was when it was made."""

    size: int
    digest: str
    inode: int
    ctime_nanos: int

    @classmethod
    def of(cls, status: os.stat_result, digest: str) -> _Made:
        return cls(status.st_size, digest, status.st_ino, status.st_ctime_ns)


class LayerDisks:
    """Makes and keeps layers' disks. Call `start` first.

    :param directory: used by this object alone.
    :param parallel: how many are made at once.
    """

    _log = Logger()

    def __init__(self, reactor: IReactor, directory: Path, make: Make, parallel: int = 0) -> None:
        self._reactor = reactor
        self._directory = directory
        self._disks = directory / "sha256"
        self._new = directory / "new"
        self._make = make
        self._gate = DeferredSemaphore(parallel or min(MAX_PARALLEL, os.cpu_count() or 1))
        self._flights: dict[str, Flight[LayerDisk]] = {}  # those that are being made, by name
        self._stopped = False

    async def start(self) -> None:
        """Make the directories, and remove what an earlier daemon left unfinished, or of another FORMAT.

        :raise OSError: they can't be used.
        """
        await self._thread(self._thd_start)

    async def stop(self) -> None:
        """End what is under way, and begin nothing more. Idempotent."""
        self._stopped = True
        await end_flights(self._flights.values())

    async def get(self, layers: Sequence[DiskSource]) -> list[LayerDisk]:
        """Return the disks of these layers, in the same order, made where they are missing or were changed.

        What has begun goes on when this is cancelled, and equal calls share it: who is told too late that a
        disk is ready asks again.

        :raise ResourceExhausted: or
        :raise OSError: there is no room for one.
        :raise InfranetesError: what the maker raises.
        """
        disks = await self._there(layers)
        if self._stopped:
            raise Unavailable("the daemon is stopping")
        lacking = [layer for layer in layers if layer.diff_id not in disks]
        linked = []
        made = await settled([self._flight(layer.diff_id, layer).join() for layer in lacking])
        for layer, disk in zip(lacking, made, strict=True):
            if isinstance(disk, Failure):
                if not disk.check(NeedsBelow):
                    disk.raiseException()
                linked.append(layer)
            else:
                disks[layer.diff_id] = disk
        for layer in linked:  # a lower one first, which the others may link to
            below = tuple(disks[diff_id].path for diff_id in layer.below if diff_id in disks)
            flight = self._flight(layer.upon, attrs.evolve(layer, disks_below=below))
            disks[layer.diff_id] = await flight.join()
        return [disks[layer.diff_id] for layer in layers]

    async def _there(self, layers: Sequence[DiskSource]) -> dict[str, LayerDisk]:
        """Return the disks of these layers that are there, by diff id."""
        names = [name for layer in layers for name in (layer.diff_id, layer.upon)]
        recorded = await self._thread(self._thd_look_at, names)
        disks = {layer.diff_id: recorded.get(layer.diff_id) or recorded.get(layer.upon) for layer in layers}
        return {diff_id: disk for diff_id, disk in disks.items() if disk is not None}

    async def lacking(self, layers: Sequence[DiskSource]) -> list[DiskSource]:
        """Return those of the layers that have no disk yet."""
        disks = await self._there(layers)
        return [layer for layer in layers if layer.diff_id not in disks]

    async def sweep(self, needed: Collection[str]) -> None:
        """Remove disks of other layers than those with the diff ids `needed`. None of these is being made."""

        def sweep() -> None:
            for path in self._disks.iterdir():
                name = path.name.removesuffix(".new").removesuffix(".json")
                if _UPON.sub("", name) not in names:
                    path.unlink(missing_ok=True)

        names = {self._path(diff_id).name for diff_id in needed}
        await self._thread(sweep)

    def _flight(self, name: str, layer: DiskSource) -> Flight[LayerDisk]:
        """Return the making of a layer's disk. :param name: the diff id, or `Source.upon`."""
        flight = self._flights.get(name)
        if flight is None or flight.done:
            flight = self._flights[name] = Flight(self._made(name, layer))
        return flight

    async def _made(self, name: str, layer: DiskSource) -> LayerDisk:
        target = self._new / name.removeprefix("sha256:")
        what = f"making the disk of layer {layer.diff_id}"
        try:
            async with self._gate:
                recorded = await self._thread(self._thd_look_at, [name])
                if name in recorded:  # another call had it made after this one had looked
                    return recorded[name]
                began = self._reactor.seconds()
                try:
                    await self._thread(self._thd_clear, name)
                    await self._thread(self._thd_check_room, layer)
                    built = await self._make(layer, target)
                    disk = await self._thread(self._thd_keep, name, target, built)
                finally:
                    await self._thread(_thd_remove, [target])
                seconds = self._reactor.seconds() - began
                self._log.info(
                    "{what}: {size} bytes in {seconds:.2f} s", what=what, size=disk.size, seconds=seconds
                )
                return disk
        finally:
            del self._flights[name]

    # ---- in a thread

    def _thd_start(self) -> None:
        shutil.rmtree(self._new, ignore_errors=True)
        for path in (self._new, self._disks):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = [path.name for path in self._disks.iterdir()]
        ids = {f"sha256:{name.partition('.')[0]}" for name in names}
        keep = {disk.path.name for disk in self._thd_look_at(ids).values()}
        _thd_remove(self._disks / name for name in names if name.removesuffix(".json") not in keep)

    def _thd_look_at(self, diff_ids: Iterable[str]) -> dict[str, LayerDisk]:
        """Return the disks that are there and are what was recorded."""
        disks = {}
        for diff_id in diff_ids:
            path = self._path(diff_id)
            try:
                record = cattrs.structure(json.loads(_beside(path).read_bytes()), _Made)
                unchanged = record == _Made.of(path.lstat(), record.digest)
            except FileNotFoundError:
                continue
            except Exception:  # whatever is wrong with the record, the disk can be made again
                unchanged = False
            if unchanged:
                disks[diff_id] = LayerDisk(_UPON.sub("", diff_id), path, record.size, record.digest)
            else:
                self._log.warn(
                    "{path} has changed on the disk; it is made again when it is needed", path=str(path)
                )
        return disks

    def _thd_clear(self, diff_id: str) -> None:
        """Remove a disk that was changed; the next one is another file."""
        path = self._path(diff_id)
        _thd_remove([_beside(path), path])

    def _thd_check_room(self, layer: DiskSource) -> None:
        """Refuse before the node's disk is full rather than after."""
        stat = os.statvfs(self._directory)
        if layer.unpacked > stat.f_bavail * stat.f_frsize:
            raise ResourceExhausted(
                f"{self._directory} has {stat.f_bavail * stat.f_frsize} bytes free, the disk of layer "
                f"{layer.diff_id} needs about {layer.unpacked}; remove images or make room, then call again"
            )

    def _thd_keep(self, diff_id: str, target: Path, built: BuiltDisk) -> LayerDisk:
        path = self._path(diff_id)
        try:
            target.replace(path)
            record = _Made.of(path.lstat(), built.digest)
            replace_file(_beside(path), json.dumps(attrs.asdict(record)))  # syncs the name of the disk, too
        except BaseException:
            path.unlink(missing_ok=True)  # without a record it is of no use, and takes up room
            raise
        return LayerDisk(_UPON.sub("", diff_id), path, record.size, record.digest)

    def _path(self, diff_id: str) -> Path:
        return self._disks / f"{diff_id.removeprefix('sha256:')}.{FORMAT}"

    async def _thread(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        return await run_in_thread(self._reactor, work, *args, purpose=IMAGES)


async def end_flights(flights: Iterable[Flight[T]]) -> None:
    """Cancel work, and wait until all of it has ended."""
    flights = [*flights]
    for flight in flights:
        flight.cancel()
    for flight in flights:
        await until_landed(flight)


async def until_landed(flight: Flight[T]) -> None:
    """Wait until work has ended, with whatever result, which nobody asks for."""
    ended = flight.join()
    await until_ended(ended)
    ended.addErrback(lambda _: None)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _thd_remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
