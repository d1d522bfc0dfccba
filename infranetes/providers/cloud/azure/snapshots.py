# SPDX-License-Identifier: Apache-2.0
"""Azure's incremental snapshots of disks as `DiskSnapshots`.

They are of no zone, so a disk of any zone can be made from them. Their names are made as disks' are.

provisioningState    completionPercent      SnapshotState
Creating, Updating   any                    TAKING
Succeeded            none, or 100           READY
Succeeded            less                   COPYING: of the newest types' disks alone
Failed               any                    FAILED
Deleting             any                    DELETING
"""

from __future__ import annotations

from datetime import datetime

from infranetes.providers.cloud.azure import errors
from infranetes.providers.cloud.azure.driver import DISK, SNAPSHOT, Driver
from infranetes.providers.cloud.azure.names import Group, hashed_name_of, is_name, last
from infranetes.providers.cloud.azure.resources import Snapshot
from infranetes.providers.cloud.azure.settings import Settings
from infranetes.providers.cloud.interface import CLUSTER
from infranetes.providers.cloud.volumes import disk_snapshots
from infranetes.providers.cloud.volumes.disk_snapshots import CloudSnapshot, SnapshotRequest, SnapshotState

_STATES = {
    "Succeeded": SnapshotState.READY,
    "Failed": SnapshotState.FAILED,
    "Deleting": SnapshotState.DELETING,
}
_OURS = disk_snapshots.SNAPSHOT  # the tag


class AzureSnapshots:
    """See `DiskSnapshots`."""

    clones = True
    outlive_volumes = True

    def __init__(self, settings: Settings, group: Group, cluster: str) -> None:
        self._settings = settings
        self._group = group
        self._cluster = cluster

    def is_id(self, text: str) -> bool:
        return is_name(text)

    def _thd_find(self, driver: Driver, name: str) -> list[CloudSnapshot]:
        snapshot = self._thd_get(driver, hashed_name_of("snapshot", self._cluster, name))
        return [snapshot] if snapshot is not None and snapshot.ours else []

    def _thd_get(self, driver: Driver, id: str) -> CloudSnapshot | None:
        snapshot = driver.snapshot(id)
        return self._shown(snapshot) if snapshot is not None else None

    def _thd_list(self, driver: Driver) -> list[CloudSnapshot]:
        return [one for one in map(self._shown, driver.snapshots()) if one.ours]

    def _thd_create(self, driver: Driver, request: SnapshotRequest) -> str:
        body = {
            "location": self._settings.location,
            "tags": {CLUSTER: request.cluster, _OURS: request.name},
            "properties": {
                "incremental": True,
                "creationData": {
                    "createOption": "Copy",
                    "sourceResourceId": self._group.resource(DISK, request.volume),
                },
            },
        }
        name = hashed_name_of("snapshot", request.cluster, request.name)
        with errors.disk_refusals():
            return driver.begin_create(SNAPSHOT, name, body)

    def _thd_delete(self, driver: Driver, snapshot: CloudSnapshot) -> str:
        with errors.disk_refusals():
            return driver.begin_delete(SNAPSHOT, snapshot.id)

    def _shown(self, snapshot: Snapshot) -> CloudSnapshot:
        properties, tags = snapshot["properties"], snapshot.get("tags") or {}
        said = properties.get("provisioningState", "")
        state = _STATES.get(said, SnapshotState.TAKING)
        percent = properties.get("completionPercent")
        if state is SnapshotState.READY and percent is not None and percent < 100:
            state = SnapshotState.COPYING
        is_ours = tags.get(CLUSTER) == self._cluster and _OURS in tags
        created = properties.get("timeCreated")
        return CloudSnapshot(
            id=snapshot["name"],
            volume=last(properties.get("creationData", {}).get("sourceResourceId") or ""),
            size=int(properties.get("diskSizeGB") or 0) << 30,
            created=datetime.fromisoformat(created).timestamp() if created else 0.0,
            state=state,
            ours=is_ours,
            name=tags[_OURS] if is_ours else "",
            detail=f"its provisioningState is {said}",
        )
