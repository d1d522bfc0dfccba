# SPDX-License-Identifier: Apache-2.0
"""The cluster's Services as they are now: followed at the API server, and kept as a table of rules."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from twisted.application.service import Service as TwistedService
from twisted.internet.defer import Deferred

from infranetes.services.api_server import ApiServer
from infranetes.services.follow import Follower
from infranetes.services.kinds import Kind, OwnNodes, Services, Slices
from infranetes.services.objects import OwnNode
from infranetes.services.sender import IAgent, RuleSender
from infranetes.services.table import Table
from infranetes.services.watch import Event, Watch
from infranetes_common.concurrency import Notifier, sleep, start
from infranetes_common.reactors import IReactor

TURN_SECONDS = 0.01  # that the reactor is kept busy at a time


class ClusterServices(TwistedService):
    """Follows Services, EndpointSlices and this daemon's Node.

    :param node: the Node's name.
    :ivar table: the rules. :ivar changed: wakes whoever waits for changes of the table.
    """

    name = "services"

    def __init__(self, reactor: IReactor, server: ApiServer, node: str) -> None:
        self._reactor = reactor
        self._events: deque[tuple[Kind, Event]] = deque()
        self._arrived = Notifier()
        self._working: Deferred[None] | None = None
        self.table = Table(OwnNode(node))
        self.changed = Notifier()
        self._kinds = (Services(self.table), Slices(self.table), OwnNodes(self.table))
        self._followers = [
            Follower(
                reactor, server, kind.path, Watch(kind.selectors(node), random.random), self._taker(kind)
            )
            for kind in self._kinds
        ]

    def startService(self) -> None:
        """Begin to follow. Nothing is waited for here."""
        super().startService()  # type: ignore[no-untyped-call]
        self._working = start(self._work())
        self._working.addErrback(lambda failure: None)
        for follower in self._followers:
            follower.start()

    def stopService(self) -> None:
        """Follow no more."""
        super().stopService()  # type: ignore[no-untyped-call]
        for follower in self._followers:
            follower.stop()
        if self._working is not None:
            self._working.cancel()

    def sender(self, agent: IAgent) -> RuleSender:
        """Return what keeps a VM's rules as those of the table. It is to be started and stopped."""
        return RuleSender(self._reactor, agent, self.table, self.changed)

    def _taker(self, kind: Kind) -> Callable[[Event], None]:
        def take(event: Event) -> None:
            self._events.append((kind, event))
            self._arrived.notify()

        return take

    async def _work(self) -> None:
        """Put events into the table, for a moment at a time."""
        while True:
            while not self._events:
                await self._arrived.wait()
            until = self._reactor.seconds() + TURN_SECONDS
            while self._events:
                kind, event = self._events.popleft()
                for _ in kind.take(event):
                    if self._reactor.seconds() >= until:
                        self._tell()
                        await sleep(self._reactor, 0)
                        until = self._reactor.seconds() + TURN_SECONDS
            self._tell()

    def _tell(self) -> None:
        self.table.complete = all(kind.listed for kind in self._kinds)
        self.changed.notify()
