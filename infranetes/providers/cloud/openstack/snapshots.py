# SPDX-License-Identifier: Apache-2.0
"""Cinder's snapshots as `DiskSnapshots`.

status of a snapshot    SnapshotState
creating                TAKING
available               READY
backing-up, restoring   COPYING
deleting, deleted       DELETING
unmanaging              DELETING
error, error_deleting   FAILED

A volume is not deleted while it has snapshots, but it is enlarged. Names are as those of volumes: of several
snapshots with one name only the first is listed, and all of them are deleted together.
"""

from __future__ import annotations

from datetime import UTC, datetime

from libcloud.common.exceptions import BaseHTTPError

from infranetes.providers.cloud.interface import CLUSTER, CloudError, ErrorKind
from infranetes.providers.cloud.openstack.driver import Driver
from infranetes.providers.cloud.openstack.errors import disk_refusals
from infranetes.providers.cloud.openstack.libcloud_types import Snapshot
from infranetes.providers.cloud.openstack.names import hashed_name_of, is_id
from infranetes.providers.cloud.volumes.disk_snapshots import (
    SNAPSHOT,
    CloudSnapshot,
    SnapshotRequest,
    SnapshotState,
)

_STATES = {
    "creating": SnapshotState.TAKING,
    "available": SnapshotState.READY,
    "deleting": SnapshotState.DELETING,
    "deleted": SnapshotState.DELETING,
    "unmanaging": SnapshotState.DELETING,
    "error": SnapshotState.FAILED,
    "error_deleting": SnapshotState.FAILED,
}
_ERROR_DELETING = "status is error_deleting"


class OpenStackSnapshots:
    """See `DiskSnapshots`."""

    clones = True
    outlive_volumes = False

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster

    def is_id(self, text: str) -> bool:
        return is_id(text)

    def _thd_find(self, driver: Driver, name: str) -> list[CloudSnapshot]:
        found = driver.snapshots(name=hashed_name_of(self._cluster, name))
        return [each for each in map(self._shown, found) if each.ours and each.name == name]

    def _thd_get(self, driver: Driver, id: str) -> CloudSnapshot | None:
        found = driver.snapshot(id)
        return None if found is None else self._shown(found)

    def _thd_list(self, driver: Driver) -> list[CloudSnapshot]:
        first: dict[str, CloudSnapshot] = {}
        found = map(self._shown, driver.snapshots(metadata=str({CLUSTER: self._cluster})))
        for each in sorted(found, key=lambda one: (one.created, one.id)):
            if each.ours and each.state in (SnapshotState.COPYING, SnapshotState.READY):
                first.setdefault(each.name, each)
        return list(first.values())

    def _thd_create(self, driver: Driver, request: SnapshotRequest) -> str:
        if not self._thd_find(driver, request.name):
            with disk_refusals():
                driver.make_snapshot(
                    {
                        "volume_id": request.volume,
                        "name": hashed_name_of(request.cluster, request.name),
                        "description": f"the snapshot {request.name!r} of the cluster {request.cluster}"[
                            :255
                        ],
                        "force": True,  # even if a server has the volume
                        "metadata": {CLUSTER: request.cluster, SNAPSHOT: request.name},
                    }
                )
        return ""

    def _thd_delete(self, driver: Driver, snapshot: CloudSnapshot) -> str:
        if _ERROR_DELETING in snapshot.detail:
            raise CloudError(
                ErrorKind.INVALID,
                f"{snapshot.detail}: its deletion has failed, and an operator has to delete it",
            )
        twins = self._thd_find(driver, snapshot.name) if snapshot.name else []
        left = [one.id for one in twins if _is_left(one, snapshot)]
        for id in [*left, snapshot.id]:
            try:
                with disk_refusals():
                    driver.delete_snapshot(id)
            except BaseHTTPError as error:
                if int(error.code) != 404:
                    raise
        return f"delete-snapshot {snapshot.id}"

    def _shown(self, snapshot: Snapshot) -> CloudSnapshot:
        told = snapshot.get("metadata") or {}
        ours = told.get(CLUSTER) == self._cluster and SNAPSHOT in told
        return CloudSnapshot(
            id=snapshot["id"],
            volume=snapshot["volume_id"],
            size=int(snapshot["size"]) << 30,
            created=datetime.fromisoformat(snapshot["created_at"]).replace(tzinfo=UTC).timestamp(),
            state=_STATES.get(snapshot["status"], SnapshotState.COPYING),
            ours=ours,
            name=told[SNAPSHOT] if ours else "",
            detail=f"its status is {snapshot['status']}",
        )


def _is_left(twin: CloudSnapshot, snapshot: CloudSnapshot) -> bool:
    """Return whether a snapshot of the same name is to be deleted with another."""
    usable = twin.state is not SnapshotState.DELETING and _ERROR_DELETING not in twin.detail
    return usable and twin.id != snapshot.id
