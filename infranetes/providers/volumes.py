# SPDX-License-Identifier: Apache-2.0
"""`IVolumes`, the interface between the daemon and an IaaS' disks that outlive VMs: Kubernetes' volumes."""

from __future__ import annotations

import re
from collections.abc import Mapping

import attrs
from twisted.internet.defer import Deferred
from zope.interface import Attribute, Interface

MAX_NAME = 128  # bytes of a name, as CSI has it
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


def is_volume_id(text: str) -> bool:
    """Whether it can be a volume's id, of whatever provider: a provider may allow less. None leads out of a
    directory."""
    return _ID.fullmatch(text) is not None and not {"", ".", ".."} & set(text.split("/"))


@attrs.frozen
class VolumeDisk:
    """A volume as the IaaS knows it.

    :ivar id: chosen by the provider; see `is_volume_id`. :ivar size: in bytes.
    :ivar zone: where a VM has to be to be given it, in the IaaS' words; "": anywhere that this provider
        launches."""

    id: str
    size: int
    zone: str = ""


class IHasVolumes(Interface):
    """Also provided by an IPodProvider whose IaaS has volumes."""

    volumes = Attribute("An `IVolumes`. It works from the provider's start on.")


class IVolumes(Interface):
    """Makes, finds, attaches and destroys volumes: disks that belong to no VM.

    - Methods never block the reactor, and fail only with errors of `infranetes_common.errors`; of these,
      `Unavailable` alone means that the same call may succeed later. Each may be called twice.
    - A new volume is all zeros. Nobody but a VM writes to it.
    - A volume is attached to one VM at most, and is never destroyed with it.
    - What has to be known of a volume is kept by the IaaS, or where it survives the daemon.
    - Cancelling a Deferred may stop the wait, but leaves no volume half made.
    """

    topology: Mapping[str, str] = Attribute(
        "Where volumes are, in the words of Kubernetes: labels of the nodes whose VMs they can be attached "
        "to. Empty: to those of all nodes."
    )

    unit: int = Attribute("Volumes' sizes are multiples of so many bytes.")

    def create(name: str, size: int) -> Deferred[VolumeDisk]:
        """Make a volume. Idempotent by name: if there is one, it is returned as it is, whatever its size.

        :param name: 1 to MAX_NAME bytes of text, chosen by whoever calls; never a path.
        :param size: bytes, a multiple of `unit`.
        :raise ResourceExhausted: there is no room, or a quota is used up.
        :raise OutOfRange: no volume can be so large.
        """

    def delete(volume_id: str) -> Deferred[None]:
        """Destroy a volume and what it holds. It is no error if there is none, or none can have this id.

        :raise FailedPrecondition: it is attached to a VM, or a person has to destroy it.
        """

    def expand(volume_id: str, size: int) -> Deferred[VolumeDisk]:
        """Make a volume at least so large, also while it is attached: then its VM sees the new size. One that
        is as large already stays as it is.

        :raise NotFound: there is none. :raise ResourceExhausted: as in `create`.
        :raise OutOfRange: no volume can be so large.
        """

    def get(volume_id: str) -> Deferred[VolumeDisk]:
        """Look up a volume. :raise NotFound: there is none."""

    def list() -> Deferred[list[VolumeDisk]]:
        """List all volumes, in the order of their ids."""

    def free() -> Deferred[int]:
        """Return how many bytes the largest volume could have that can be made now.

        :raise Unimplemented: the IaaS does not tell."""

    def attach(instance_id: str, volume_id: str, read_only: bool) -> Deferred[str]:
        """Attach a volume to a running VM. Returns the disk's serial number there, which the guest finds a
        moment later: `serial_of(volume_id)` where the provider can choose. Idempotent.

        :param read_only: whether the VM can't write to the disk.
        :raise NotFound: there is no such VM, or no such volume.
        :raise FailedPrecondition: it is attached to another VM, or to this one in the other mode.
        :raise ResourceExhausted: the VM has no place for one more; the message says how many it has.
        :raise Unavailable: the VM does not run, or the IaaS does not answer.
        """

    def detach(instance_id: str, volume_id: str) -> Deferred[None]:
        """Take a volume from a VM, which has unmounted it. Idempotent.

        It is no error if it is not attached to this VM, or there is no such VM or volume: once this has
        succeeded the VM has no way to the volume.

        :raise Unavailable: the VM or the IaaS does not let go of it; it is still attached.
        """
