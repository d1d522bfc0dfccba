# SPDX-License-Identifier: Apache-2.0
"""Snapshots of volumes of this node, and volumes that begin with the content of a snapshot or another volume:
copies of files."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from twisted.internet.defer import DeferredLock
from twisted.logger import Logger
from zope.interface import implementer

from infranetes.providers.qemu.volumes.attached import VolumeAttacher
from infranetes.providers.qemu.volumes.copies import Copies
from infranetes.providers.qemu.volumes.files import VolumeFiles, id_of, remove_rests
from infranetes.providers.qemu.volumes.room import check_size
from infranetes.providers.qemu.volumes.snapshot_files import SnapshotFiles
from infranetes.providers.volumes import FromVolume, ISnapshots, VolumeDisk, VolumeSnapshot, VolumeSource
from infranetes_common.concurrency import Flight, KeyedLock, deferred, run_in_thread, shielded
from infranetes_common.errors import AlreadyExists, InfranetesError, NotFound, OutOfRange
from infranetes_common.reactors import IReactor

_log = Logger()


@implementer(ISnapshots)
class QemuSnapshots:
    """See `ISnapshots`. A call that copies much takes as long as that takes.

    :param volumes: the files of volumes. :param being_made: held while a volume is made, by its id.
    :param room: held while room is reserved."""

    clones = True
    outlive_volumes = True

    def __init__(
        self,
        reactor: IReactor,
        volumes: VolumeFiles,
        copies: Copies,
        attacher: VolumeAttacher,
        being_made: KeyedLock[str],
        room: DeferredLock,
    ) -> None:
        self._reactor = reactor
        self._volumes = volumes
        self._files = SnapshotFiles(volumes.directory)
        self._copies = copies
        self._attacher = attacher
        self._volumes_in_work = being_made
        self._room = room
        self._in_work: KeyedLock[str] = KeyedLock()
        self._sweeping: Flight[None] | None = None

    @deferred
    async def create(self, name: str, volume_id: str) -> VolumeSnapshot:
        return await shielded(self._create(id_of(name), volume_id))

    @deferred
    async def delete(self, snapshot_id: str) -> None:
        await shielded(self._delete(snapshot_id))

    @deferred
    async def get(self, snapshot_id: str) -> VolumeSnapshot:
        return await run_in_thread(self._reactor, self._files.get, snapshot_id)

    @deferred
    async def list(self) -> list[VolumeSnapshot]:
        return await run_in_thread(self._reactor, self._files.all)

    @deferred
    async def restore(self, name: str, size: int, source: VolumeSource) -> VolumeDisk:
        return await shielded(self._restore(id_of(name), size, source))

    @deferred
    async def sweep(self) -> None:
        """Remove what a killed daemon has left, once."""
        if self._sweeping is None:
            self._sweeping = Flight(self._sweep())
        await self._sweeping.join()

    # ---- Taken and removed

    async def _create(self, snapshot_id: str, volume_id: str) -> VolumeSnapshot:
        await self.sweep()
        async with self._in_work.held(snapshot_id):
            try:
                found = await self.get(snapshot_id)
            except NotFound:
                return await self._take(snapshot_id, volume_id)
        if found.volume != volume_id:
            raise AlreadyExists(f"snapshot {snapshot_id} is there already, and is of volume {found.volume}")
        return found

    async def _take(self, snapshot_id: str, volume_id: str) -> VolumeSnapshot:
        path = await run_in_thread(self._reactor, self._volumes.to_copy, volume_id)
        target = await run_in_thread(self._reactor, self._files.begin, snapshot_id)
        try:
            created = await self._copies.of_volume(volume_id, path, target)
            root = await run_in_thread(self._reactor, self._volumes.root, volume_id)
            return await run_in_thread(
                self._reactor, self._files.finish, snapshot_id, volume_id, created, root
            )
        finally:
            self._volumes.release(target)
            await run_in_thread(self._reactor, self._files.drop, snapshot_id)

    async def _delete(self, snapshot_id: str) -> None:
        async with self._in_work.held(snapshot_id):
            await run_in_thread(self._reactor, self._files.delete, snapshot_id)

    # ---- Volumes that begin with what they hold

    async def _restore(self, volume_id: str, size: int, source: VolumeSource) -> VolumeDisk:
        await self.sweep()
        async with self._volumes_in_work.held(volume_id):
            try:
                found = await run_in_thread(self._reactor, self._volumes.get, volume_id)
            except NotFound:
                return await self._make(volume_id, size, source)
        if found.source != source:
            raise AlreadyExists(f"volume {volume_id} is there already, and did not begin with {source.id}")
        return found

    async def _make(self, volume_id: str, size: int, source: VolumeSource) -> VolumeDisk:
        copy = await self._copying(size, source)
        async with self._room:
            target = await run_in_thread(self._reactor, self._volumes.begin, volume_id, size)
        try:
            await copy(target)
            of = self._volumes.root if isinstance(source, FromVolume) else self._files.root
            root = await run_in_thread(self._reactor, of, source.id)
            return await run_in_thread(self._reactor, self._volumes.finish, volume_id, size, source, root)
        finally:
            await run_in_thread(self._reactor, self._volumes.drop, volume_id)

    async def _copying(self, size: int, source: VolumeSource) -> Callable[[Path], Awaitable[object]]:
        """Return the function that copies a source to a file.

        :raise InfranetesError: there is no such source, or it is larger than `size`.
        """
        check_size(size)
        if isinstance(source, FromVolume):
            path = await run_in_thread(self._reactor, self._volumes.to_copy, source.id)
            least = (await run_in_thread(self._reactor, self._volumes.get, source.id)).size
        else:
            path = await run_in_thread(self._reactor, self._files.disk, source.id)
            least = (await self.get(source.id)).size
        if size < least:
            raise OutOfRange(f"{source.id} has {least} bytes: a volume made from it has no fewer")

        async def copy(target: Path) -> None:
            if isinstance(source, FromVolume):
                await self._copies.of_volume(source.id, path, target)
            else:
                await self._copies.of_snapshot(path, target)

        return copy

    # ---- What a killed daemon has left

    async def _sweep(self) -> None:
        try:
            rests = await run_in_thread(self._reactor, self._rests)
            if rests:
                await self._attacher.end_mirrors()
                async with self._room:  # what this daemon makes meanwhile is no rest
                    await run_in_thread(self._reactor, self._remove_again, rests)
        except (InfranetesError, OSError) as error:
            _log.warn("a copy that an earlier daemon began is not cleaned up for now: {error}", error=error)

    def _remove_again(self, seen: Sequence[Path]) -> None:
        """Remove the rests that were seen before, and still are."""
        remove_rests({*seen} & {*self._rests()})

    def _rests(self) -> Sequence[Path]:
        return [*self._files.rests(), *self._volumes.rests()]
