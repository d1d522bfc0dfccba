# SPDX-License-Identifier: Apache-2.0
"""`IPodVolumes`: what the CSI driver asks about volumes that are mounted in pods' VMs."""

from __future__ import annotations

import attrs
from twisted.internet.defer import Deferred
from zope.interface import Interface


@attrs.frozen
class VolumeUse:
    """The use of a volume's file system, in bytes and inodes; 0 `inodes`: it has no limit of inodes."""

    total: int
    used: int
    available: int
    inodes: int = 0
    inodes_used: int = 0
    inodes_free: int = 0


class IPodVolumes(Interface):
    """The volumes of this node's pods."""

    def usage(volume_id: str) -> Deferred[VolumeUse]:
        """Measure a volume in the VM that has it.

        :raise Unavailable: no VM has it mounted now, or the VM does not answer."""

    def flush(volume_id: str, target: str) -> Deferred[None]:
        """Flush what was written to a volume to its disk, if the pod of that path still has it in its VM.

        Waits for no VM that does not answer: the log says that something may be missing. Idempotent."""

    def grow(volume_id: str) -> Deferred[None]:
        """Have a volume's file system fill its disk, if it is mounted in a VM; otherwise it will when it is.

        :raise Unavailable: the VM does not answer."""
