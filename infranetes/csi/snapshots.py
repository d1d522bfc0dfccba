# SPDX-License-Identifier: Apache-2.0
"""CSI's Controller service, the calls about snapshots: they are taken, listed and destroyed.

Volumes are made from them by `infranetes.csi.controller`.
"""

from __future__ import annotations

from infranetes.csi import checks
from infranetes.csi.checks import InFlight
from infranetes.csi.pages import page
from infranetes.providers.volumes import (
    FromSnapshot,
    FromVolume,
    ISnapshots,
    VolumeSnapshot,
    VolumeSource,
    is_volume_id,
)
from infranetes_common.errors import InvalidArgument, NotFound
from infranetes_common.wire import csi
from infranetes_common.wire.csi_rpcs import ControllerSnapshotRpcs
from txgrpc import Call

_RPC = csi.ControllerServiceCapability.RPC


class Snapshots(ControllerSnapshotRpcs):
    """The RPCs of CSI's Controller service for snapshots: one method per RPC.

    :param snapshots: the provider's. :param in_flight: shared with the other services."""

    def __init__(self, snapshots: ISnapshots, in_flight: InFlight) -> None:
        self._snapshots = snapshots
        self._in_flight = in_flight

    async def CreateSnapshot(
        self, request: csi.CreateSnapshotRequest, call: Call
    ) -> csi.CreateSnapshotResponse:
        name = checks.text("name", request.name, checks.MAX_ID)
        volume_id = checks.text("source_volume_id", request.source_volume_id, checks.MAX_ID)
        checks.parameters(request.parameters, "VolumeSnapshotClass")
        if not is_volume_id(volume_id):
            raise NotFound(f"source_volume_id: there is no volume {volume_id[:80]!r}: none can have this id")
        with self._in_flight.only(f"snapshot {name}"):
            taken = await self._snapshots.create(name, volume_id)
        return csi.CreateSnapshotResponse(snapshot=_shown(taken))

    async def DeleteSnapshot(
        self, request: csi.DeleteSnapshotRequest, call: Call
    ) -> csi.DeleteSnapshotResponse:
        snapshot_id = checks.text("snapshot_id", request.snapshot_id, checks.MAX_ID)
        if is_volume_id(snapshot_id):
            with self._in_flight.only(f"snapshot {snapshot_id}"):
                await self._snapshots.delete(snapshot_id)
        return csi.DeleteSnapshotResponse()

    async def ListSnapshots(self, request: csi.ListSnapshotsRequest, call: Call) -> csi.ListSnapshotsResponse:
        if request.snapshot_id:
            found = await self._one(request.snapshot_id)
        else:
            found = await self._snapshots.list()
        if request.source_volume_id:
            found = [each for each in found if each.volume == request.source_volume_id]
        shown, token = page(found, request.max_entries, request.starting_token)
        entries = [csi.ListSnapshotsResponse.Entry(snapshot=_shown(each)) for each in shown]
        return csi.ListSnapshotsResponse(entries=entries, next_token=token)

    async def GetSnapshot(self, request: csi.GetSnapshotRequest, call: Call) -> csi.GetSnapshotResponse:
        snapshot_id = checks.text("snapshot_id", request.snapshot_id, checks.MAX_ID)
        found = await self._one(snapshot_id)
        if not found:
            raise NotFound(f"there is no snapshot {snapshot_id[:80]!r}")
        return csi.GetSnapshotResponse(snapshot=_shown(found[0]))

    async def _one(self, snapshot_id: str) -> list[VolumeSnapshot]:
        if not is_volume_id(snapshot_id):
            return []
        try:
            return [await self._snapshots.get(snapshot_id)]
        except NotFound:
            return []


def offered(snapshots: ISnapshots | None) -> tuple[csi.ControllerServiceCapability.RPC.Type, ...]:
    """Return the capabilities that the Controller has in addition if the provider has snapshots."""
    if snapshots is None:
        return ()
    found = (_RPC.CREATE_DELETE_SNAPSHOT, _RPC.LIST_SNAPSHOTS, _RPC.GET_SNAPSHOT)
    return (*found, _RPC.CLONE_VOLUME) if snapshots.clones else found


def source_of(request: csi.CreateVolumeRequest, snapshots: ISnapshots | None) -> VolumeSource | None:
    """Return the source of a new volume's content; None: it begins with zeros.

    :raise InvalidArgument: the source is neither a snapshot nor a volume, or the provider can't copy it.
    :raise NotFound: nothing can have its id."""
    if not request.HasField("volume_content_source"):
        return None
    asked = request.volume_content_source
    kind = asked.WhichOneof("type")
    if snapshots is None or (kind == "volume" and not snapshots.clones):
        raise InvalidArgument(f"volume_content_source: this provider makes no copies of {kind or 'volume'}s")
    source: VolumeSource
    if kind == "snapshot":
        source = FromSnapshot(asked.snapshot.snapshot_id)
    elif kind == "volume":
        source = FromVolume(asked.volume.volume_id)
    else:
        raise InvalidArgument("volume_content_source: it is neither a snapshot nor a volume")
    checks.text(f"volume_content_source: {kind}", source.id, checks.MAX_ID)
    if not is_volume_id(source.id):
        raise NotFound(f"volume_content_source: there is no {kind} {source.id[:80]!r}: none can have this id")
    return source


def shown_source(source: VolumeSource) -> csi.VolumeContentSource:
    """Translate the source of a volume's content to CSI's message."""
    kinds = csi.VolumeContentSource
    if isinstance(source, FromSnapshot):
        return kinds(snapshot=kinds.SnapshotSource(snapshot_id=source.id))
    return kinds(volume=kinds.VolumeSource(volume_id=source.id))


def _shown(found: VolumeSnapshot) -> csi.Snapshot:
    seconds = int(found.created)
    return csi.Snapshot(
        size_bytes=found.size,
        snapshot_id=found.id,
        source_volume_id=found.volume,
        creation_time=csi.Timestamp(seconds=seconds, nanos=int((found.created - seconds) * 1e9)),
        ready_to_use=found.ready,
    )
