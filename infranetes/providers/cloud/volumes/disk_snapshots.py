# SPDX-License-Identifier: Apache-2.0
"""The interface that each cloud implements for snapshots; `snapshots.CloudSnapshots` is common to all clouds.

The rules in `disks` for methods, their errors and operations hold here too.
"""

from __future__ import annotations

import enum
from typing import Protocol, runtime_checkable

import attrs

from infranetes.providers.cloud.volumes.disks import D_contra

# The tag that marks a snapshot as made by us; its value is the name. The tag `interface.CLUSTER` is set too.
SNAPSHOT = "infranetes-snapshot"


class SnapshotState(enum.Enum):
    """The state of a snapshot."""

    TAKING = "taking"  # it may still fail, or still take in what is written to the disk next
    COPYING = "copying"  # its content is settled, but no disk can be made from it yet
    READY = "ready"
    DELETING = "deleting"
    FAILED = "failed"  # will never be ready


@attrs.frozen
class CloudSnapshot:
    """A snapshot as the cloud describes it."""

    id: str  # as in `ISnapshots`; satisfies `is_volume_id`
    volume: str  # the id of its disk, which may be gone
    size: int  # the disk's size in bytes when the snapshot was taken
    created: float  # seconds since 1970 UTC
    state: SnapshotState
    ours: bool = False  # made by us, for this cluster: has both tags
    name: str = ""  # the name that was asked for; "": it is not ours, or the cloud can't tell
    detail: str = ""  # why it failed, for people


@attrs.frozen
class SnapshotRequest:
    """A request for one snapshot."""

    name: str  # 1 to 128 bytes of any text
    volume: str  # a disk's id
    cluster: str


@runtime_checkable
class DiskSnapshots(Protocol[D_contra]):
    """The snapshots of one cloud's disks, for one cluster."""

    clones: bool  # whether disks can be made from disks: see `DiskRequest.source`
    # As `ISnapshots.outlive_volumes`; if not, `CloudDisks` refuses to delete a disk with snapshots (INVALID).
    outlive_volumes: bool

    def is_id(self, text: str) -> bool:
        """Return whether a text could be a snapshot's id. Nothing else is ever sent to the cloud as one."""

    def _thd_find(self, driver: D_contra, name: str) -> list[CloudSnapshot]:
        """Our snapshots of this name, in any state; where the cloud may have several, all of them."""

    def _thd_get(self, driver: D_contra, id: str) -> CloudSnapshot | None:
        """Return a snapshot, whoever made it; None: there is none."""

    def _thd_list(self, driver: D_contra) -> list[CloudSnapshot]:
        """Return all snapshots of ours, in any state."""

    def _thd_create(self, driver: D_contra, request: SnapshotRequest) -> str:
        """Ask for a snapshot with both tags; return the operation, which `CloudDisks` knows. If there is one
        of this name, that is either not an error or STATE."""

    def _thd_delete(self, driver: D_contra, snapshot: CloudSnapshot) -> str:
        """Ask for a snapshot's end; return the operation. A missing snapshot is not an error."""
