# SPDX-License-Identifier: Apache-2.0
"""The interface that each cloud implements for volumes; `volumes.CloudVolumes` is common to all clouds.

As with `interface.Cloud`: blocking methods named `_thd_…`, each in one of a bounded number of threads with
a driver of its own, retried, limited and broken off by `calls.Calls`. A call whose answer was lost is
made again, so each of them is idempotent, or fails with `ErrorKind.STATE` the second time.

A method that changes something returns the cloud's operation, if it has to be followed: "" where the state of
the disk tells all, and otherwise a text that `_thd_is_done` understands. No method waits for anything.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

import attrs

from infranetes.providers.volumes import VolumeSource

D_contra = TypeVar("D_contra", contravariant=True)  # a cloud's driver

# The tag that marks a volume as made by us; its value is the name. The tag `interface.CLUSTER` is set too,
# but never NODE and TOKEN: a disk that has those is deleted with its VM.
VOLUME = "infranetes-volume"


class DiskState(enum.Enum):
    """The state of a disk, whichever VM it is attached to."""

    CREATING = "creating"  # can't be attached yet
    READY = "ready"  # whether it is attached or not
    DELETING = "deleting"
    FAILED = "failed"  # will never be ready


class HoldState(enum.Enum):
    """The stages of a disk's attachment to a VM."""

    ATTACHING = "attaching"
    ATTACHED = "attached"
    DETACHING = "detaching"


@attrs.frozen
class Hold:
    """A VM that a disk is attached to, or is being attached to or detached from."""

    vm_id: str
    state: HoldState = HoldState.ATTACHED
    read_only: bool = False


@attrs.frozen
class CloudDisk:
    """A disk as the cloud describes it."""

    id: str  # as in `IVolumes`; satisfies `is_volume_id`
    size: int  # bytes that a VM sees or will see; the old size until the disk has really grown
    state: DiskState
    serial: str = ""  # a guest finds the disk by it; see `infranetes_common.volume_disks.SERIAL`
    ours: bool = False  # made by us, for this cluster: has both tags
    name: str = ""  # the name that was asked for; "": it is not ours, or the cloud can't tell
    created: str = ""  # when, as the cloud writes it: it orders those of one name; "": a name has but one
    zone: str = ""  # as `volumes.VolumeDisk.zone`
    source: VolumeSource | None = None  # as `volumes.VolumeDisk.source`
    holds: tuple[Hold, ...] = ()
    detail: str = ""  # why it failed, for people
    # Seconds, for a disk that was just asked for, if the cloud tells: the request may repeat an old one.
    age: float = 0.0


@attrs.frozen
class DiskRequest:
    """A request for one disk."""

    name: str  # 1 to 128 bytes of any text: the cloud makes a name or a tag of it
    number: int  # how many disks of this name came to nothing: each disk needs an idempotency key of its own
    size: int  # bytes, a multiple of `CloudDisks.unit`, at most `CloudDisks.max_size`
    cluster: str
    source: VolumeSource | None = None  # its initial content, no larger than the disk; None: zeros


@runtime_checkable
class CloudDisks(Protocol[D_contra]):
    """The disks of one cloud, for one cluster. Methods named `_thd_…` run in threads and may raise any error;
    `Cloud.classify` tells what it means. Beside what is said below:

    - STATE: not done, as the disk or the VM is in a state that does not allow it, such as attached already.
      The caller looks at the disk again.
    - QUOTA, CAPACITY: no room for a disk, or the VM has no place for one more; says how many it has.
    - INVALID: it can never be done, such as a disk in another zone than the VM.
    """

    unit: int  # bytes; all sizes are multiples of it
    max_size: int  # bytes
    at_once: int  # the most disks in one look-up, which has to end within `CloudSettings.call_seconds`
    has_modes: bool  # whether the cloud can keep a VM from writing; if not, only the guest's mount does
    in_turns: bool  # whether a VM can't be given or give up one disk while it gives up another

    @property
    def zone(self) -> str:
        """The zone where disks are made, one in which VMs are launched; "": there is none. Known once the
        provider's `Cloud._thd_check` has returned."""

    def is_id(self, text: str) -> bool:
        """Return whether a text could be a disk's id. Nothing else is ever sent to the cloud as one."""

    def _thd_find(self, driver: D_contra, names: Sequence[str]) -> list[CloudDisk]:
        """Our disks with these names, in any state. Where the cloud has several of a name, all of them."""

    def _thd_get(self, driver: D_contra, ids: Sequence[str]) -> list[CloudDisk]:
        """Return those of these disks that exist, whoever made them. A missing disk is not an error."""

    def _thd_list(self, driver: D_contra) -> list[CloudDisk]:
        """Return all disks of ours, in any state."""

    def _thd_create(self, driver: D_contra, request: DiskRequest) -> tuple[CloudDisk, str]:
        """Ask for a disk with both tags, in `zone`; return it and the operation. Idempotent by the request,
        also if `_thd_find` does not show the disk yet: the same request again returns the same disk, which
        may have been deleted since.

        :raise CloudError: `ErrorKind.CONFLICT`: the name and number were used for another request."""

    def _thd_delete(self, driver: D_contra, disk: CloudDisk) -> str:
        """Ask for a disk's end; return the operation. A missing disk is not an error. Never detaches it."""

    def _thd_grow(self, driver: D_contra, disk: CloudDisk, size: int) -> str:
        """Ask for a larger disk, attached or not; return the operation."""

    def _thd_attach(self, driver: D_contra, disk: CloudDisk, vm_id: str, read_only: bool) -> str:
        """Ask for a disk to be attached so that it outlives the VM; return the operation. The cloud refuses
        one that is attached (STATE). Called for one disk of a VM at a time.

        :param read_only: ignored unless `has_modes`."""

    def _thd_detach(self, driver: D_contra, disk: CloudDisk, vm_id: str, force: bool) -> str:
        """Ask for a disk to be taken from this VM, and from no other; return the operation. If this VM does
        not have it, that is either not an error or STATE.

        :param force: the VM certainly does not run any more, so nothing is lost by force."""

    def _thd_is_done(self, driver: D_contra, operation: str) -> bool:
        """Return whether an operation has succeeded; False: it goes on. One that failed is raised as if the
        call that began it had failed; one that is no longer known has succeeded."""


@runtime_checkable
class TellsRoom(Protocol[D_contra]):
    """Also provided by `CloudDisks` of a cloud that tells how much room there is."""

    def _thd_free(self, driver: D_contra) -> int:
        """Return the size in bytes of the largest disk that can be made now."""
