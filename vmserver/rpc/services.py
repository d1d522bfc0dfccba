# SPDX-License-Identifier: Apache-2.0
"""ServiceRules: the node sends updates for the service proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from ipaddress import ip_address

from infranetes_common.errors import Unavailable, Unimplemented
from infranetes_common.service_proxy import rules
from infranetes_common.service_proxy.messages import as_update, state
from infranetes_common.service_proxy.placement import DROPPED, REFUSED
from infranetes_common.service_proxy.proxy import ServiceProxy
from infranetes_common.service_proxy.verdict import Verdict
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentServiceRpcs
from txgrpc import Call

MAX_SHOWN = 1024  # endpoints shown of one verdict


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
        key = rules.key(request.key) if request.HasField("key") else None
        found = await self._proxy.report(key)
        return messages.ServiceReportResponse(
            table=found.version.table,
            number=found.version.number,
            rules=found.rules,
            refused_packets=found.counters.get(REFUSED, 0),
            dropped_packets=found.counters.get(DROPPED, 0),
            flows=found.flows,
            max_flows=found.max_flows,
            verdict=None if found.verdict is None else _verdict(found.verdict),
        )


def _verdict(verdict: Verdict) -> messages.ServiceVerdict:
    return messages.ServiceVerdict(
        outcome=verdict.outcome.name,
        endpoints=[
            messages.ServiceEndpoint(address=ip_address(address).packed, port=port)
            for address, port in verdict.endpoints[:MAX_SHOWN]
        ],
        endpoint_count=len(verdict.endpoints),
        affinity_seconds=verdict.affinity_seconds,
    )
