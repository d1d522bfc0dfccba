# SPDX-License-Identifier: Apache-2.0
"""The service proxy of the node, for VMs on a bridge of its that know nothing of Kubernetes.

It translates what comes in by the bridge and is for a Service. What VMs with a proxy of their own send is
translated before it leaves them. A restarted daemon finds the tables as they were.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from infranetes.services.sender import IAgent, RuleSender
from infranetes_common.concurrency import deferred, within
from infranetes_common.errors import InfranetesError
from infranetes_common.reactors import IReactor
from infranetes_common.service_proxy.kernel import Kernel
from infranetes_common.service_proxy.messages import as_update, report, state
from infranetes_common.service_proxy.proxy import ServiceProxy
from infranetes_common.service_proxy.script import of_bridge
from infranetes_common.service_proxy.upkeep import MEND_SECONDS
from infranetes_common.wire import vmserver

_log = Logger()


class Rules(Protocol):
    """The rules of the cluster's Services."""

    def sender(self, agent: IAgent) -> RuleSender:
        """Return a sender of the rules."""


class NodeProxy:
    """Keeps a bridge's tables equal to the rules, from `start` until `stop`.

    :param rules: None: there are none, and tables of an earlier daemon's are removed.
    :ivar rules: what sends the proxy the rules; None: there are none.
    """

    def __init__(self, reactor: IReactor, bridge: str, rules: Rules | None) -> None:
        self._reactor = reactor
        # Not by the library, which reads the node's other tables, too: newer nftables' sets end its process.
        self._kernel = Kernel(reactor, tables=of_bridge(bridge), library=False)
        self._proxy = ServiceProxy(self._kernel)
        self.rules = rules.sender(_InProcess(self._proxy)) if rules is not None else None
        self._looking = LoopingCall(self._look)
        self._looking.clock = reactor

    @deferred
    async def start(self) -> None:
        """Begin. What fails is tried again; it holds up nothing else."""
        if self.rules is None:
            await self._remove()
            return
        self.rules.start()
        self._proxy.watch.begin()
        self._looking.start(MEND_SECONDS, now=False).addErrback(
            lambda failure: _log.failure("checking the node's service proxy ended", failure=failure)
        )

    @deferred
    async def stop(self) -> None:
        """End; the tables stay in force. Idempotent."""
        if self.rules is not None:
            self.rules.stop()
        if self._looking.running:
            self._looking.stop()
        await self._proxy.watch.end()

    async def service_report(
        self, key: vmserver.ServiceKey | None, seconds: float
    ) -> vmserver.ServiceReportResponse:
        """Report the state of the tables. See `IServiceAgent.service_report`."""
        return await within(
            self._reactor, seconds, report(self._proxy, key), "reading the node's tables of Services"
        )

    async def _remove(self) -> None:
        tables = self._kernel.tables
        try:
            await self._kernel.change("".join(tables.removal(version) for version in tables.versions))
        except InfranetesError as error:
            _log.info("an earlier daemon's tables of Services may be left: {error}", error=error)

    @deferred
    async def _look(self) -> None:
        try:
            await self._proxy.mend()
        except InfranetesError as error:
            _log.warn("the node's tables of Services can't be restored: {error}", error=error)


class _InProcess:
    """The part of an agent's client that a sender needs, for a proxy in this process. See `IAgent`."""

    def __init__(self, proxy: ServiceProxy) -> None:
        self._proxy = proxy

    async def service_rules(
        self, updates: AsyncIterator[vmserver.ServiceRulesUpdate]
    ) -> AsyncGenerator[vmserver.ServiceRulesState, None]:
        yield state(self._proxy)
        async for update in updates:
            await self._proxy.apply(as_update(update))
            if not update.more:
                yield state(self._proxy)
