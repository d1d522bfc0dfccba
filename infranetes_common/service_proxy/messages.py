# SPDX-License-Identifier: Apache-2.0
"""The node's messages to the service proxy, as values."""

from __future__ import annotations

from infranetes_common.errors import InvalidArgument
from infranetes_common.service_proxy import rules
from infranetes_common.service_proxy.proxy import ServiceProxy, Update, Version
from infranetes_common.wire import vmserver as messages

MAX_RULES = 10_000  # per message


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
