# SPDX-License-Identifier: Apache-2.0
"""Snapshots of any cloud's volumes, and volumes made from these.

All state is kept by the cloud: each step looks at the snapshot and does what its state requires.

snapshot   create             delete            make a volume
none       ask, look again    done              refuse (1)
taking     look again         look again        refuse (2)
copying    done               ask, look again   refuse (2)
ready      done               ask, look again   ask for the disk
failed     delete, refuse (2) ask, look again   refuse (3)
deleting   look again         done              refuse (1)

(1) NotFound (2) Unavailable (3) FailedPrecondition

Once a volume has been asked for, it proceeds as described in `volumes`, whatever becomes of its source.
"""

from __future__ import annotations

from functools import partial
from typing import Generic

from twisted.internet.defer import Deferred
from zope.interface import alsoProvides, implementer

from infranetes.providers.cloud.interface import D
from infranetes.providers.cloud.volumes.disk_calls import DiskCalls, Wait
from infranetes.providers.cloud.volumes.disk_snapshots import (
    CloudSnapshot,
    DiskSnapshots,
    SnapshotRequest,
    SnapshotState,
)
from infranetes.providers.cloud.volumes.disks import DiskState
from infranetes.providers.cloud.volumes.volumes import CloudVolumes, check_name
from infranetes.providers.volumes import (
    FromSnapshot,
    IHasSnapshots,
    ISnapshots,
    VolumeDisk,
    VolumeSnapshot,
    VolumeSource,
)
from infranetes_common.concurrency import KeyedLock
from infranetes_common.errors import (
    AlreadyExists,
    FailedPrecondition,
    NotFound,
    OutOfRange,
    Unavailable,
    Unimplemented,
)

_TAKEN = (SnapshotState.COPYING, SnapshotState.READY)


@implementer(ISnapshots)
class CloudSnapshots(Generic[D]):
    """See `ISnapshots`. Requests for one snapshot are served in order.

    :param volumes: makes volumes from snapshots. :param cluster: whose snapshots they are."""

    def __init__(
        self,
        snapshots: DiskSnapshots[D],
        calls: DiskCalls[D],
        volumes: CloudVolumes[D],
        cluster: str,
    ) -> None:
        self._snapshots = snapshots
        self._calls = calls
        self._volumes = volumes
        self._cluster = cluster
        self._in_work: KeyedLock[tuple[str, str]] = KeyedLock()  # (kind of key, key)
        self.clones = snapshots.clones
        self.outlive_volumes = snapshots.outlive_volumes

    # ---- ISnapshots

    def create(self, name: str, volume_id: str) -> Deferred[VolumeSnapshot]:
        return self._volumes.task(self._create(name, volume_id))

    def delete(self, snapshot_id: str) -> Deferred[None]:
        return self._volumes.task(self._delete(snapshot_id))

    def get(self, snapshot_id: str) -> Deferred[VolumeSnapshot]:
        async def get() -> VolumeSnapshot:
            return _shown(await self._existing(snapshot_id))

        return self._volumes.task(get())

    def list(self) -> Deferred[list[VolumeSnapshot]]:
        async def list_snapshots() -> list[VolumeSnapshot]:
            found = await self._calls.call("list snapshots", self._snapshots._thd_list)
            there = [one for one in found if one.ours and one.state in _TAKEN]
            return [_shown(one) for one in sorted(there, key=lambda one: one.id)]

        return self._volumes.task(list_snapshots())

    def restore(self, name: str, size: int, source: VolumeSource) -> Deferred[VolumeDisk]:
        return self._volumes.restore(name, size, source, partial(self._check, size, source))

    # ---- Bodies

    async def _create(self, name: str, volume_id: str) -> VolumeSnapshot:
        check_name(name)
        what = f"take snapshot {name!r}"
        wait = self._calls.wait(what)
        begun: str | None = None  # the operation, if one was begun
        async with self._in_work.held(("name", name)):
            while True:
                found = await self._find(name)
                if found is not None and found.volume != volume_id:
                    raise AlreadyExists(f"snapshot {found.id}, {name!r}, is of volume {found.volume}")
                if found is not None and found.state in _TAKEN:
                    return _shown(found)
                if found is not None and found.state is SnapshotState.FAILED:
                    await self._ask_for_end(found, wait)
                    raise Unavailable(f"{self._calls.location}: {what}: {found.detail}; try again")
                if begun is None and found is None:
                    begun = await self._begin(what, SnapshotRequest(name, volume_id, self._cluster), wait)
                elif begun and await self._calls.is_done(what, begun):
                    begun = ""
                await wait.pause()

    async def _begin(self, what: str, request: SnapshotRequest, wait: Wait) -> str | None:
        """Ask for a snapshot; return the operation; None: the disk's state does not allow it now."""
        disk = await self._calls.existing(request.volume)
        if disk.state is DiskState.FAILED:
            raise FailedPrecondition(f"volume {disk.id} has failed: {disk.detail}")
        return await self._calls.begin(what, partial(self._snapshots._thd_create, request=request), wait)

    async def _delete(self, snapshot_id: str) -> None:
        wait = self._calls.wait(f"delete snapshot {snapshot_id}")
        async with self._in_work.held(("snapshot", snapshot_id)):
            asked = False
            while True:
                found = await self._look(snapshot_id)
                if found is None or found.state is SnapshotState.DELETING:
                    return
                if not found.ours:
                    raise FailedPrecondition(
                        f"{self._calls.location}: snapshot {snapshot_id} was not taken by this cluster: "
                        "it has to be destroyed by hand"
                    )
                may_be_asked = not asked and found.state is not SnapshotState.TAKING
                if may_be_asked and (asked := await self._ask_for_end(found, wait)):
                    continue
                await wait.pause()

    async def _ask_for_end(self, snapshot: CloudSnapshot, wait: Wait) -> bool:
        delete = partial(self._snapshots._thd_delete, snapshot=snapshot)
        return await self._calls.change(f"delete snapshot {snapshot.id}", delete, wait)

    async def _check(self, size: int, source: VolumeSource) -> None:
        """Check that a volume can be made from a source. :raise InfranetesError: it can't."""
        if isinstance(source, FromSnapshot):
            found = await self._existing(source.id)
            words, smallest = f"snapshot {found.id}", found.size
            if found.state is SnapshotState.FAILED:
                raise FailedPrecondition(f"{words} has failed: {found.detail}")
            if found.state is not SnapshotState.READY:
                raise Unavailable(f"{words} is not ready yet: {self._calls.location} is still copying")
        elif not self.clones:
            raise Unimplemented(f"{self._calls.location} makes volumes from snapshots, not from volumes")
        else:
            disk = await self._calls.existing(source.id)
            words, smallest = f"volume {disk.id}", disk.size
            if disk.state is not DiskState.READY:
                raise Unavailable(f"{words} can't be cloned now: it is {disk.state.value}")
        if size < smallest:
            raise OutOfRange(f"a volume made from {words} has {smallest} bytes at least, not {size}")

    # ---- Looking

    async def _find(self, name: str) -> CloudSnapshot | None:
        """Find the snapshot of a name: of several, the one that all calls take. None: there is none."""
        found = await self._calls.call("find a snapshot", partial(self._snapshots._thd_find, name=name))
        return min(found, key=lambda one: (one.state not in _TAKEN, one.created, one.id), default=None)

    async def _look(self, snapshot_id: str) -> CloudSnapshot | None:
        if not self._snapshots.is_id(snapshot_id):
            return None
        return await self._calls.call(
            f"look at snapshot {snapshot_id}", partial(self._snapshots._thd_get, id=snapshot_id)
        )

    async def _existing(self, snapshot_id: str) -> CloudSnapshot:
        """Look at a snapshot. :raise NotFound: there is none."""
        found = await self._look(snapshot_id)
        if found is None or found.state is SnapshotState.DELETING:
            raise NotFound(f"there is no snapshot {snapshot_id[:80]!r} at {self._calls.location}")
        return found


def give_snapshots(
    volumes: CloudVolumes[D], snapshots: DiskSnapshots[D], calls: DiskCalls[D], cluster: str
) -> None:
    """Make volumes provide `IHasSnapshots`."""
    volumes.snapshots = CloudSnapshots(snapshots, calls, volumes, cluster)
    alsoProvides(volumes, IHasSnapshots)


def _shown(snapshot: CloudSnapshot) -> VolumeSnapshot:
    return VolumeSnapshot(
        snapshot.id,
        snapshot.volume,
        snapshot.size,
        snapshot.created,
        ready=snapshot.state is SnapshotState.READY,
    )
