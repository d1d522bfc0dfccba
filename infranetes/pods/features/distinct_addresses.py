# SPDX-License-Identifier: Apache-2.0
"""No two pods of a node have one address, as pods of two tenants may whose networks have the same addresses.

Of the two, the one whose VM is up later is refused, and its VM is destroyed. VMs of one provider are left
alone: if two of these have one address, one of them is gone without the node knowing it yet.
"""

from __future__ import annotations

from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Inventory, Sandbox
from infranetes.pods.store.states import SandboxState
from infranetes_common.errors import FailedPrecondition

_BEGINNING = (SandboxState.LAUNCHING, SandboxState.BOOTING)


class DistinctAddresses(PodFeature):
    """Refuses a pod whose VM has the address of another provider's, or tenant's, pod."""

    name = "addresses"

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory

    def connected(self, sandbox: Sandbox) -> None:
        """:raise FailedPrecondition: another pod has the address; names it."""
        if sandbox.state not in _BEGINNING or not sandbox.record.address:
            return
        for other in self._inventory:
            if self._collides(sandbox, other):
                raise FailedPrecondition(
                    f"the VM of {sandbox.record.provider} has the address {sandbox.record.address}, which "
                    f"pod {other.pod} of {other.record.provider} has too: the node can't tell them apart. "
                    "Give their networks different addresses, or floating ones (pod_address), or let this "
                    "pod run on another node"
                )

    @staticmethod
    def _collides(sandbox: Sandbox, other: Sandbox) -> bool:
        """Return whether another pod, whose VM is there, has this one's address."""
        return (
            other.client is not None
            and other.record.provider != sandbox.record.provider
            and other.record.address == sandbox.record.address
        )
