# SPDX-License-Identifier: Apache-2.0
"""ServiceRules: the node sends updates for the service proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from ipaddress import ip_address

from infranetes_common.errors import InvalidArgument, Unavailable, Unimplemented
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentServiceRpcs
from txgrpc import Call
from vmserver.proxy import rules
from vmserver.proxy.placement import DROPPED, REFUSED
from vmserver.proxy.proxy import ServiceProxy, Update, Version
from vmserver.proxy.verdict import Verdict

MAX_RULES = 10_000  # per message
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
        yield _state(self._proxy)
        async for request in requests:
            if self._newest is not call:
                raise Unavailable("a newer call sends the service proxy's rules")
            await self._proxy.apply(as_update(request))
            if not request.more:
                yield _state(self._proxy)

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


def _state(proxy: ServiceProxy) -> messages.ServiceRulesState:
    return messages.ServiceRulesState(table=proxy.version.table, number=proxy.version.number)


def as_update(request: messages.ServiceRulesUpdate) -> Update:
    """Validate and convert an update. :raise InvalidArgument: it is malformed."""
    if len(request.changed) + len(request.removed) > MAX_RULES:
        raise InvalidArgument(f"an update has at most {MAX_RULES} rules in one message")
    if not request.table or len(request.table) > 64:
        raise InvalidArgument("an update has to name its table")
    return Update(
        Version(request.table, request.number),
        {rules.key(each.key): rules.rule(each) for each in request.changed},
        [rules.key(each) for each in request.removed],
        request.all,
        request.more,
        rules.ranges(request.ranges.ranges) if request.HasField("ranges") else None,
    )
