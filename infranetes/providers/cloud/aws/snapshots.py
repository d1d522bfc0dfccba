# SPDX-License-Identifier: Apache-2.0
"""EBS snapshots as `DiskSnapshots`.

A snapshot is of the instant at which EC2 has answered; what it holds is copied afterwards.

state of a snapshot      SnapshotState
pending                  COPYING
completed                READY
error                    FAILED
recoverable, recovering  DELETING: somebody has deleted it, and EC2's recycle bin has it

EC2 has no client tokens for snapshots: a request whose answer was lost may have made a snapshot that is not
listed yet, and the next request then makes a second one. Of several with one name only the first is listed,
and all of them are deleted together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime

from infranetes.providers.cloud.aws import errors
from infranetes.providers.cloud.aws.addresses import filter_parameters, tag_parameters
from infranetes.providers.cloud.aws.disks import literally
from infranetes.providers.cloud.aws.driver import Driver, items, text
from infranetes.providers.cloud.aws.libcloud_types import Element
from infranetes.providers.cloud.interface import CLUSTER, ErrorKind
from infranetes.providers.cloud.volumes.disk_snapshots import (
    SNAPSHOT,
    CloudSnapshot,
    SnapshotRequest,
    SnapshotState,
)

_ID = re.compile(r"snap-[0-9a-f]{8,17}")
_STATES = {
    "pending": SnapshotState.COPYING,
    "completed": SnapshotState.READY,
    "error": SnapshotState.FAILED,
    "recoverable": SnapshotState.DELETING,
    "recovering": SnapshotState.DELETING,
}


class AwsSnapshots:
    """See `DiskSnapshots`."""

    clones = False
    outlive_volumes = True

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster

    def is_id(self, text: str) -> bool:
        return _ID.fullmatch(text) is not None

    def _thd_find(self, driver: Driver, name: str) -> list[CloudSnapshot]:
        found = self._thd_ours(driver, {f"tag:{SNAPSHOT}": literally(name)})
        return [each for each in found if each.name == name]

    def _thd_get(self, driver: Driver, id: str) -> CloudSnapshot | None:
        # A filter is used because asking for an id that does not exist is an error.
        found = self._thd_described(driver, {"snapshot-id": id})
        return found[0] if found else None

    def _thd_list(self, driver: Driver) -> list[CloudSnapshot]:
        first: dict[str, CloudSnapshot] = {}
        found = self._thd_ours(driver, {"tag-key": SNAPSHOT})
        for each in sorted(found, key=lambda one: (one.created, one.id)):
            if each.state in (SnapshotState.COPYING, SnapshotState.READY):
                first.setdefault(each.name, each)
        return list(first.values())

    def _thd_create(self, driver: Driver, request: SnapshotRequest) -> str:
        """Send EC2's own request: libcloud's `create_volume_snapshot` tags a snapshot only once it exists, so
        one could stay without tags."""
        if not self._thd_find(driver, request.name):
            tags = {CLUSTER: request.cluster, SNAPSHOT: request.name}
            parameters = tag_parameters("snapshot", tags)
            driver.request("CreateSnapshot", VolumeId=request.volume, **parameters)
        return ""

    def _thd_delete(self, driver: Driver, snapshot: CloudSnapshot) -> str:
        twins = self._thd_find(driver, snapshot.name) if snapshot.name else []
        for id in sorted({snapshot.id, *(each.id for each in twins)}, key=lambda id: id == snapshot.id):
            try:
                driver.delete_snapshot(id)
            except Exception as error:
                found = errors.classify(error)
                if found is None or found.kind is not ErrorKind.NOT_FOUND:
                    raise
        return ""

    def _thd_ours(self, driver: Driver, filters: dict[str, str]) -> Iterable[CloudSnapshot]:
        found = self._thd_described(driver, {**filters, f"tag:{CLUSTER}": literally(self._cluster)})
        return [each for each in found if each.ours]

    def _thd_described(self, driver: Driver, filters: dict[str, str]) -> list[CloudSnapshot]:
        """Describe snapshots; libcloud's `list_snapshots` has no filters, and would list those of all
        accounts."""
        answer = driver.request("DescribeSnapshots", **filter_parameters(filters))
        return [self._shown(each) for each in items(answer, "snapshotSet/item")]

    def _shown(self, snapshot: Element) -> CloudSnapshot:
        tags = {text(tag, "key"): text(tag, "value") for tag in items(snapshot, "tagSet/item")}
        state = text(snapshot, "status")
        words = text(snapshot, "statusMessage")
        return CloudSnapshot(
            id=text(snapshot, "snapshotId"),
            volume=text(snapshot, "volumeId"),
            size=int(text(snapshot, "volumeSize") or 0) << 30,
            created=datetime.fromisoformat(text(snapshot, "startTime")).timestamp(),
            state=_STATES.get(state, SnapshotState.COPYING),
            ours=tags.get(CLUSTER) == self._cluster and SNAPSHOT in tags,
            name=tags.get(SNAPSHOT, ""),
            detail=f"its state is {state}" + (f": {words}" if words else ""),
        )
