# SPDX-License-Identifier: Apache-2.0
"""The cluster's present Services: followed at the API server, and kept as a table of rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from infranetes.kubernetes.cluster import Cluster
from infranetes.kubernetes.requests import Requests
from infranetes.services.kinds import OwnNodes, ServiceRanges, Services, Slices
from infranetes.services.messages import Batches
from infranetes.services.objects import OwnNode
from infranetes.services.pace import Pace
from infranetes.services.sender import IAgent, RuleSender
from infranetes.services.table import RuleTable
from infranetes_common.concurrency import Notifier
from infranetes_common.reactors import IReactor


class ClusterServices(Cluster):
    """Follows Services, EndpointSlices, ServiceCIDRs and this daemon's Node.

    :param node: the Node's name.
    :ivar table: the rules. :ivar changed: notified when the table may have changed.
    """

    name = "services"

    def __init__(self, reactor: IReactor, server: Requests, node: str) -> None:
        self.table = RuleTable(OwnNode(node))
        self.changed = Notifier()
        self._batches = Batches(self.table)
        self._pace = Pace(reactor)
        kinds = (
            Services(self.table),
            Slices(self.table),
            ServiceRanges(self.table),
            OwnNodes(self.table, node),
        )
        super().__init__(reactor, server, kinds, self._renew)

    def status(self) -> Mapping[str, object]:
        """Return the state of Services, for Status."""
        heard = [each.heard_seconds for each in self.followed if each.heard_seconds is not None]
        return {
            "rules": self.table.count,
            "complete": self.complete,
            "trouble": self.trouble,
            "heard_seconds": min(heard, default=None),
        }

    def do(self, steps: Iterable[None]) -> None:
        super().do(self._noted(steps, self._reactor.seconds()))

    def _noted(self, steps: Iterable[None], heard_at: float) -> Iterable[None]:
        """Do the steps, and note the time at which the changes that they make to the table were received."""
        for _ in steps:
            self.table.news.note(self.table.number, heard_at)
            yield
        self.table.news.note(self.table.number, heard_at)

    def sender(self, agent: IAgent) -> RuleSender:
        """Return a sender that keeps a VM's rules equal to the table's. The caller starts and stops it."""
        return RuleSender(self._reactor, agent, self.table, self.changed, self._batches, self._pace)

    def _renew(self) -> None:
        self.table.complete = self.complete
        self.changed.notify()
