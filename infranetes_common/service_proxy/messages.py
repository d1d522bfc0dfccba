# SPDX-License-Identifier: Apache-2.0
"""The messages between the node and a service proxy, as values."""

from __future__ import annotations

from ipaddress import ip_address

from infranetes_common.errors import InvalidArgument
from infranetes_common.service_proxy import rules
from infranetes_common.service_proxy.placement import DROPPED, REFUSED
from infranetes_common.service_proxy.proxy import ServiceProxy, Update, Version
from infranetes_common.service_proxy.verdict import Verdict
from infranetes_common.wire import vmserver as messages

MAX_RULES = 10_000  # per message
MAX_SHOWN = 1024  # endpoints shown of one verdict


def state(proxy: ServiceProxy) -> messages.ServiceRulesState:
    """Return the message that tells which version is in force."""
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


async def report(proxy: ServiceProxy, key: messages.ServiceKey | None) -> messages.ServiceReportResponse:
    """Return a proxy's report. :param key: a destination, on which it is to have the verdict.

    :raise InvalidArgument: `key` is malformed.
    :raise InfranetesError: another program has changed the tables, and they can't be mended."""
    found = await proxy.report(None if key is None else rules.key(key))
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
