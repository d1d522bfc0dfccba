# SPDX-License-Identifier: Apache-2.0
"""What a guest without our agent is told of its pod, as far as CDs can tell it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import attrs

from infranetes.machines.agentless.access import GuestFile
from infranetes.providers.machine_images import GuestConfiguration


@attrs.frozen
class GuestDisk:
    """A volume that is a disk of the VM, and where the guest is to mount it."""

    serial: str
    filesystem: str = ""  # "": it is not mounted, the guest finds it by its serial number
    options: tuple[str, ...] = ()
    read_only: bool = False
    mount_path: str = ""


@attrs.frozen
class PodFacts:
    """What the node knows of a guest's pod once its container is created."""

    sandbox_id: str
    namespace: str = ""  # of Kubernetes
    hostname: str = ""
    nameservers: tuple[str, ...] = ()
    searches: tuple[str, ...] = ()
    environment: Mapping[str, str] = attrs.field(factory=dict)
    # The mounts by their path in the guest: a volume's id, and what follows it after a "/" is a path in it.
    mounts: Mapping[str, str] = attrs.field(factory=dict)
    disks: tuple[GuestDisk, ...] = ()
    root: str | None = None  # the id of the volume that is its root; None: its root goes with the VM


Configure = Callable[[PodFacts, Mapping[str, GuestFile]], Awaitable[GuestConfiguration]]
"""Makes what a guest is told; the files are those of its volumes, by their whole path in the guest.

:raise InfranetesError: the pod's annotations ask for what can't be, or can't be had now."""
