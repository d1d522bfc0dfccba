# SPDX-License-Identifier: Apache-2.0
"""`IVolumes`, the interface between the daemon and an IaaS' disks that outlive VMs: Kubernetes' volumes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import attrs
from twisted.internet.defer import Deferred
from zope.interface import Attribute, Interface

if TYPE_CHECKING:
    from infranetes.providers.machine_images import BaseDisk, BootDisk

MAX_NAME = 128  # bytes of a name: CSI's limit
FLEX_PREFIX = "flex."  # of the names of FlexVolumes; no volume that CSI makes has it
ROOT_SERIAL = "root"  # of the disk that a VM boots; no volume that is attached to a running VM has it
ZONE = "topology.kubernetes.io/zone"  # Kubernetes' label for the zone that something is in
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


def is_volume_id(text: str) -> bool:
    """Return whether a text can be a volume's id with any provider; one provider may allow less. No such id
    leads out of a directory."""
    return _ID.fullmatch(text) is not None and not {"", ".", ".."} & set(text.split("/"))


@attrs.frozen
class FromSnapshot:
    """The snapshot whose content a volume began with."""

    id: str


@attrs.frozen
class FromVolume:
    """The volume whose content a volume, its clone, began with."""

    id: str


VolumeSource: TypeAlias = FromSnapshot | FromVolume


@attrs.frozen
class VolumeDisk:
    """A volume as the IaaS knows it.

    :ivar id: chosen by the provider; see `is_volume_id`. :ivar size: in bytes.
    :ivar zone: where a VM has to be to be given it, as the label `ZONE` says it; "": anywhere that this
        provider launches.
    :ivar source: the source of its first content, even if gone by now; None: it began with zeros."""

    id: str
    size: int
    zone: str = ""
    source: VolumeSource | None = None


class IHasVolumes(Interface):
    """Also provided by an IPodProvider whose IaaS has volumes."""

    volumes: IVolumes = Attribute("They work from the provider's start on.")


class ILendsDevices(Interface):
    """Also provided by an `IVolumes` that attaches block devices of the node to its VMs."""

    lends: bool = Attribute("Whether there are any that pods may have.")

    def lend(path: str) -> Deferred[str]:
        """Return the id by which `IVolumes.attach` and `detach` know a block device of the node.

        No list has it, and it can be neither made nor deleted.

        :param path: without links.
        :raise FailedPrecondition: no pod may have it; the message says what to do."""


class IKeepsRoots(Interface):
    """Also provided by an `IVolumes` whose volumes can be roots of VMs that boot images of the node.

    A VM that was launched with such a root has the volume attached from its launch on, for as long as it
    exists: `attach` returns `ROOT_SERIAL` for it, and `detach` fails with `Unavailable` before that.
    """

    def root(volume_id: str, base: BaseDisk, replace: bool) -> Deferred[BootDisk]:
        """Have a volume be a root made of an image, and return it as a disk to launch a VM with. Idempotent.

        One that is all zeros is filled with the image's disk; one that was filled with it stays as it is,
        with all that was written to it since. Both are known for as long as the volume exists. A filling that
        was interrupted is begun anew by the next call. Cancelling ends it.

        :param base: nobody removes it meanwhile.
        :param replace: whether a volume that holds anything else is filled too, and loses that.
        :raise NotFound: there is no such volume.
        :raise FailedPrecondition: it holds something else, or is smaller than the image's disk, or a VM has
            it, or it is being changed.
        :raise DeadlineExceeded: it takes too long.
        """


class IVolumes(Interface):
    """A maker of volumes, which are disks that belong to no VM; it also finds, attaches and destroys them.

    - Methods never block the reactor, and fail only with errors of `infranetes_common.errors`; of these,
      only `Unavailable` means that the same call may succeed later. Each may be called twice.
    - A new volume is all zeros. Nobody but a VM writes to it.
    - A volume is attached to one VM at most, and is never destroyed with it.
    - What has to be known of a volume is kept by the IaaS, or where it survives the daemon.
    - Cancelling a Deferred may stop the wait, but leaves no volume half made.
    """

    topology: Mapping[str, str] = Attribute(
        "Where volumes are, in the words of Kubernetes: labels of the nodes whose VMs they can be attached "
        "to. Empty: to those of all nodes. Fails with Unavailable until the provider has started, if the "
        "IaaS has to be asked."
    )

    unit: int = Attribute("Volumes' sizes are multiples of so many bytes.")

    def create(name: str, size: int) -> Deferred[VolumeDisk]:
        """Make a volume. Idempotent by name: an existing volume is returned as it is, whatever its size.

        :param name: 1 to MAX_NAME bytes of text, chosen by the caller; never a path.
        :param size: bytes, a multiple of `unit`.
        :raise ResourceExhausted: there is no room, or a quota is used up.
        :raise OutOfRange: no volume can be so large.
        """

    def delete(volume_id: str) -> Deferred[None]:
        """Destroy a volume and its content. If there is none, or none can have this id, do nothing.

        :raise FailedPrecondition: it is attached to a VM, or a person has to destroy it.
        """

    def expand(volume_id: str, size: int) -> Deferred[VolumeDisk]:
        """Enlarge a volume to at least `size` bytes; if it is attached its VM sees the new size.

        A volume that is large enough stays as it is.

        :raise NotFound: there is none. :raise ResourceExhausted: as in `create`.
        :raise OutOfRange: no volume can be so large.
        """

    def get(volume_id: str) -> Deferred[VolumeDisk]:
        """Look up a volume. :raise NotFound: there is none."""

    def list() -> Deferred[list[VolumeDisk]]:
        """List all volumes, in the order of their ids."""

    def free() -> Deferred[int]:
        """Return the size in bytes of the largest volume that can be made now.

        :raise Unimplemented: the IaaS does not tell."""

    def attach(instance_id: str, volume_id: str, read_only: bool) -> Deferred[str]:
        """Attach a volume to a running VM. Returns the disk's serial number there, which the guest finds a
        moment later: `serial_of(volume_id)` where the provider can choose. Idempotent.

        :param read_only: whether the VM is kept from writing to the disk: by the IaaS if it can, otherwise
            only by the guest.
        :raise NotFound: there is no such VM, or no such volume.
        :raise FailedPrecondition: it is attached to another VM, or to this one in the other mode
            where the IaaS has modes.
        :raise ResourceExhausted: the VM has no place for one more; the message says how many it has.
        :raise Unavailable: the VM does not run, or the IaaS does not answer.
        """

    def detach(instance_id: str, volume_id: str) -> Deferred[None]:
        """Detach a volume from a VM, which has unmounted it. Idempotent.

        It is no error if it is not attached to this VM, or there is no such VM or volume: once this has
        succeeded the VM has no way to the volume.

        :raise Unavailable: the VM or the IaaS does not release it; it is still attached.
        """


@attrs.frozen
class VolumeSnapshot:
    """A snapshot as the IaaS knows it.

    :ivar id: chosen by the provider, as volumes' ids are. :ivar volume: the id of the volume it is of, which
        may be gone.
    :ivar size: the volume's when it was taken, in bytes: no volume made from it is smaller.
    :ivar created: when, in seconds since the epoch.
    :ivar ready: whether a volume can be made from it: some IaaS copy what it holds after it was taken."""

    id: str
    volume: str
    size: int
    created: float
    ready: bool = True


class ISnapshots(Interface):
    """A maker of snapshots of volumes, and of volumes that begin with the content of a snapshot or volume.

    - What `IVolumes` says of its methods holds for these too: errors, calls made twice, cancelling.
    - A snapshot, or clone, holds what its volume held at one instant between call and answer, as a loss of
      power would have left it: all that the VM had flushed by the call, and of later writes none without the
      flushed writes that came before it. Nobody has to stop writing, and the VM is not held up while the
      content is copied.
    - It depends on nothing else: its volume may be changed, enlarged or deleted, and so may a snapshot of
      which volumes were made. Without `outlive_volumes`, a volume that has snapshots is not deleted, and with
      some IaaS not enlarged either: that fails with `FailedPrecondition`.
    - Taking it never keeps a volume from being attached, detached, enlarged or deleted: where one has to wait
      for the other, taking the snapshot fails with `Unavailable`, and may be tried again.
    """

    clones: bool = Attribute("Whether volumes can be made from volumes too: `restore` takes a `FromVolume`.")

    outlive_volumes: bool = Attribute("Whether snapshots are kept apart from their volumes.")

    def create(name: str, volume_id: str) -> Deferred[VolumeSnapshot]:
        """Take a snapshot. Idempotent by name: an existing snapshot of this volume is returned as it is.

        Once this has succeeded the snapshot stays, although it may not be `ready` yet: see `get`.

        :param name: as in `IVolumes.create`; snapshots' names are apart from volumes'.
        :raise NotFound: there is no such volume.
        :raise AlreadyExists: a snapshot of another volume has the name.
        :raise FailedPrecondition: none can be taken of this volume.
        :raise ResourceExhausted: there is no room, or a quota is used up.
        """

    def delete(snapshot_id: str) -> Deferred[None]:
        """Destroy a snapshot. If there is none, or none can have this id, do nothing.

        :raise FailedPrecondition: it is in use, or a person has to destroy it.
        """

    def get(snapshot_id: str) -> Deferred[VolumeSnapshot]:
        """Look up a snapshot. :raise NotFound: there is none."""

    def list() -> Deferred[list[VolumeSnapshot]]:
        """List all snapshots, in the order of their ids."""

    def restore(name: str, size: int, source: VolumeSource) -> Deferred[VolumeDisk]:
        """Make a volume that begins with the content of a snapshot or of another volume.

        Idempotent by name, as `IVolumes.create` is. Beyond the source's size the volume is zeros.

        :param size: bytes, a multiple of `IVolumes.unit`.
        :raise NotFound: there is no such source.
        :raise AlreadyExists: a volume of this name began with something else.
        :raise OutOfRange: it would be smaller than its source, or none can be so large.
        :raise FailedPrecondition: none can be made from this source.
        :raise ResourceExhausted: as in `create`. :raise Unavailable: the snapshot is not ready yet.
        :raise Unimplemented: a `FromVolume`, without `clones`.
        """


class IHasSnapshots(IVolumes):
    """An `IVolumes` whose IaaS has snapshots of its volumes."""

    snapshots: ISnapshots = Attribute("It works from the provider's start on.")
