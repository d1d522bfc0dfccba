# SPDX-License-Identifier: Apache-2.0
"""The verdict of the table on a pod's connections to an address."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import attrs

from infranetes.services.endpoints import Target
from infranetes.services.rules import Key, Without
from infranetes.services.table import RuleTable
from infranetes_common.addresses import Address


class Outcome(enum.Enum):
    """The outcome of a connection, named as in `ServiceVerdict.Outcome`."""

    TRANSLATED = "translated"
    REFUSED = "refused"
    DROPPED = "dropped"
    OTHER_PORT = "other port"
    UNALLOCATED = "unallocated"
    UNTOUCHED = "untouched"


@attrs.frozen
class Verdict:
    """The outcome of a pod's connections to a key.

    :ivar why: the reason, as a message. :ivar endpoints: the endpoints among which connections are spread."""

    outcome: Outcome
    why: str
    endpoints: tuple[Target, ...] = ()
    affinity_seconds: int = 0


def judge(table: RuleTable, key: Key, own: Iterable[Address]) -> Verdict:
    """Return the verdict on a pod's connections to `key`.

    :param own: the pod's addresses.
    """
    rule = table.rule(key)
    if rule is None:
        return _without_rule(table, key)
    ranges = rule.source_ranges
    if ranges and not any(address in each for address in own for each in ranges):
        allowed = ", ".join(map(str, ranges[:5])) + (", ..." if len(ranges) > 5 else "")
        return Verdict(Outcome.DROPPED, f"the pod is not in loadBalancerSourceRanges: {allowed}")
    if not rule.endpoints:
        if rule.without is Without.DROPPED:
            return Verdict(Outcome.DROPPED, "internalTrafficPolicy is Local, and no endpoint is on this node")
        return Verdict(Outcome.REFUSED, "there is no endpoint that is ready, or that ends and serves")
    return Verdict(Outcome.TRANSLATED, "", rule.endpoints, rule.affinity_seconds)


def _without_rule(table: RuleTable, key: Key) -> Verdict:
    ports = sorted(
        f"{change.key.port}/{change.key.protocol.lower()}"
        for change in table.everything()
        if change.key.address == key.address and change.rule is not None and change.rule.cluster_ip
    )
    if ports:
        return Verdict(Outcome.OTHER_PORT, f"this cluster IP has other ports: {', '.join(ports[:20])}")
    for each in table.ranges:
        if key.address in each:
            return Verdict(Outcome.UNALLOCATED, f"it is in the ServiceCIDR {each}, and no Service has it")
    return Verdict(Outcome.UNTOUCHED, "it is no Service's address")
