# SPDX-License-Identifier: Apache-2.0
"""The node's pools: its own, and those of handlers that have one."""

from __future__ import annotations

from infranetes.machines.pool import Pool
from infranetes.pods.node.sides import ProviderSide


class Pools:
    """VMs that wait for a pod.

    :ivar own: the node's own pool; set before use. :ivar others: the pools of handlers."""

    own: Pool

    def __init__(self) -> None:
        self.others: list[Pool] = []

    def all(self) -> list[Pool]:
        """Return every pool, the node's own first."""
        return [self.own, *self.others]

    def of(self, side: ProviderSide) -> list[Pool]:
        """Return the pools whose VMs are of this side."""
        return [pool for pool in self.all() if pool.context is side]
