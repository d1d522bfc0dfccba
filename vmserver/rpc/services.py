# SPDX-License-Identifier: Apache-2.0
"""ServiceRules: the node sends updates for the service proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator

from infranetes_common.errors import Unavailable, Unimplemented
from infranetes_common.service_proxy.messages import as_update, report, state
from infranetes_common.service_proxy.proxy import ServiceProxy
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentServiceRpcs
from txgrpc import Call


class ServiceCalls(AgentServiceRpcs):
    """Passes updates to the service proxy; only the newest call's count.

    :param proxy: None: this machine has none.
    """

    def __init__(self, proxy: ServiceProxy | None) -> None:
        self._proxy = proxy
        self._newest: Call | None = None

    async def ServiceRules(
        self, requests: AsyncIterator[messages.ServiceRulesUpdate], call: Call
    ) -> AsyncIterator[messages.ServiceRulesState]:
        if self._proxy is None:
            raise Unimplemented("the agent shares this machine, so it has no service proxy")
        self._newest = call
        yield state(self._proxy)
        async for request in requests:
            if self._newest is not call:
                raise Unavailable("a newer call sends the service proxy's rules")
            await self._proxy.apply(as_update(request))
            if not request.more:
                yield state(self._proxy)

    async def ServiceReport(
        self, request: messages.ServiceReportRequest, call: Call
    ) -> messages.ServiceReportResponse:
        if self._proxy is None:
            raise Unimplemented("the agent shares this machine, so it has no service proxy")
        return await report(self._proxy, request.key if request.HasField("key") else None)
