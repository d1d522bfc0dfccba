# SPDX-License-Identifier: Apache-2.0
"""The node's pools: its own, and those of handlers that have one."""

from __future__ import annotations

from collections.abc import Iterable

from infranetes.machines.pool import Pool
from infranetes.pods.node.node_providers import NodeProvider


class Pools:
    """VMs that wait for a pod.

    :ivar own: the node's own pool. :ivar others: the pools of handlers."""

    def __init__(self, own: Pool, others: Iterable[Pool] = ()) -> None:
        self.own = own
        self.others = [*others]

    def all(self) -> list[Pool]:
        """Return every pool, the node's own first."""
        return [self.own, *self.others]

    def of(self, node_provider: NodeProvider) -> list[Pool]:
        """Return the pools whose VMs are of this provider."""
        return [pool for pool in self.all() if pool.context is node_provider]
