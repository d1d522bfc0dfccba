# SPDX-License-Identifier: Apache-2.0
"""Compute Engine's snapshots of disks as `DiskSnapshots`.

They are of no zone, so a disk of any zone can be made from them. Their names are made as disks' are.

status of a snapshot    SnapshotState
CREATING                TAKING
UPLOADING               COPYING          what it holds is settled; disks can be made once it is READY
READY                   READY
FAILED                  FAILED
DELETING                DELETING
"""

from __future__ import annotations

import re
from datetime import datetime

from libcloud.common.google import GoogleBaseError

from infranetes.providers.cloud.gcp import errors
from infranetes.providers.cloud.gcp.disks import NO_ZONE, as_text
from infranetes.providers.cloud.gcp.driver import Driver
from infranetes.providers.cloud.gcp.libcloud_types import Snapshot
from infranetes.providers.cloud.gcp.names import (
    LABEL,
    disk_of,
    filter_of,
    hashed_name_of,
    label,
    labels,
    split_id,
    value,
)
from infranetes.providers.cloud.gcp.settings import Settings
from infranetes.providers.cloud.interface import CLUSTER, ErrorKind
from infranetes.providers.cloud.volumes.disk_snapshots import (
    SNAPSHOT,
    CloudSnapshot,
    SnapshotRequest,
    SnapshotState,
)

_STATES = {
    "CREATING": SnapshotState.TAKING,
    "UPLOADING": SnapshotState.COPYING,
    "READY": SnapshotState.READY,
    "FAILED": SnapshotState.FAILED,
    "DELETING": SnapshotState.DELETING,
}


class GcpSnapshots:
    """See `DiskSnapshots`."""

    clones = True
    outlive_volumes = True

    def __init__(self, settings: Settings, cluster: str) -> None:
        self._settings = settings
        self._cluster = cluster

    def is_id(self, text: str) -> bool:
        return re.fullmatch(LABEL, text) is not None

    def _thd_find(self, driver: Driver, name: str) -> list[CloudSnapshot]:
        found = self._thd_get(driver, hashed_name_of(self._cluster, name))
        return [found] if found is not None and found.ours else []

    def _thd_get(self, driver: Driver, id: str) -> CloudSnapshot | None:
        snapshot = driver.snapshot(id)
        return None if snapshot is None else self._shown(snapshot)

    def _thd_list(self, driver: Driver) -> list[CloudSnapshot]:
        found = driver.snapshots(filter_of({CLUSTER: self._cluster}))
        return [one for one in map(self._shown, found) if one.ours]

    def _shown(self, snapshot: Snapshot) -> CloudSnapshot:
        tags, status = snapshot.get("labels") or {}, snapshot.get("status", "")
        return CloudSnapshot(
            id=snapshot["name"],
            volume=disk_of(snapshot.get("sourceDisk") or ""),
            size=int(snapshot.get("diskSizeGb") or 0) << 30,
            created=datetime.fromisoformat(snapshot["creationTimestamp"]).timestamp(),
            state=_STATES.get(status, SnapshotState.TAKING),
            ours=tags.get(CLUSTER) == label(self._cluster) and SNAPSHOT in tags,
            name=value(tags.get(SNAPSHOT, "")),
            detail=f"its status is {status}",
        )

    def _thd_create(self, driver: Driver, request: SnapshotRequest) -> str:
        zone, disk = split_id(request.volume)
        body = {
            "name": hashed_name_of(request.cluster, request.name),
            "description": f"the snapshot {request.name} of the cluster {request.cluster}",
            "labels": labels({CLUSTER: request.cluster, SNAPSHOT: request.name}),
        }
        try:
            with errors.disk_refusals():
                return as_text(zone, driver.create_snapshot(zone, disk, body))
        except GoogleBaseError as error:
            cloud_error = errors.classify(error)
            if cloud_error is None or cloud_error.kind is not ErrorKind.CONFLICT:
                raise
            return ""  # it was asked for before, and the answer was lost

    def _thd_delete(self, driver: Driver, snapshot: CloudSnapshot) -> str:
        with errors.disk_refusals():
            return as_text(NO_ZONE, driver.delete_snapshot(snapshot.id))
