# SPDX-License-Identifier: Apache-2.0
"""The placement of VMs' processes in the node's control groups."""

from __future__ import annotations

from typing import Protocol

from infranetes.providers.qemu.record import VmRecord


class Placement(Protocol):
    """Places the processes of VMs in control groups, where the node measures and limits their use."""

    async def place(self, record: VmRecord, pid: int) -> None:
        """Put a VM's process, which has not loaded the template's state yet, in its place. Idempotent.

        :raise InfranetesError: it is not there; the VM is not to execute.
        """

    async def pin(self, record: VmRecord, pid: int, cpus: str, mems: str) -> None:
        """Have a VM's process use these processors and memory nodes. See `IPinsVms`."""

    async def forget(self, record: VmRecord) -> None:
        """Remove what was made for a VM whose process is gone. Idempotent."""

    def why_ended(self, record: VmRecord) -> str:
        """Return why the placement ended the VM's process, as a sentence; "": it did not, or can't tell."""
