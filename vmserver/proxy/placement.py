# SPDX-License-Identifier: Apache-2.0
"""What the kernel has to have for a rule.

A rule's endpoints are numbered from 0, and a connection draws one of the numbers. Where that is possible an
endpoint keeps its number, so that clients which stay with a number stay with the endpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address, ip_network

import attrs

from vmserver.proxy.rules import Rule, Target

REFUSED, DROPPED = "refused", "dropped"


@attrs.frozen
class Placement:
    """The elements of the tables for one key.

    :ivar chain: where its connections go: `spread-N`, `keep-N-SECONDS`, `refused` or `dropped`.
    :ivar slots: its endpoints by their numbers.
    :ivar cluster_ip: its address is one of those whose other ports are refused.
    """

    chain: str
    slots: tuple[Target, ...] = ()
    cluster_ip: bool = False


def place(rule: Rule, own: Iterable[str], before: Placement | None) -> Placement:
    """Return the elements for a rule.

    :param own: the pod's addresses. :param before: what the kernel has for this key now.
    """
    if rule.source_ranges and not _allowed(rule.source_ranges, own):
        return Placement(DROPPED, cluster_ip=rule.cluster_ip)
    if not rule.endpoints:
        return Placement(DROPPED if rule.dropped else REFUSED, cluster_ip=rule.cluster_ip)
    slots = _slots(rule.endpoints, before.slots if before is not None else ())
    seconds = rule.affinity_seconds
    chain = f"keep-{len(slots)}-{seconds}" if seconds else f"spread-{len(slots)}"
    return Placement(chain, slots, rule.cluster_ip)


def _slots(wanted: Iterable[Target], before: tuple[Target, ...]) -> tuple[Target, ...]:
    left = dict.fromkeys(wanted)
    slots: list[Target | None] = [None] * len(left)
    for number, target in enumerate(before[: len(slots)]):
        if target in left:
            slots[number] = target
            del left[target]
    new = iter(left)
    return tuple(next(new) if target is None else target for target in slots)


def _allowed(ranges: Iterable[str], own: Iterable[str]) -> bool:
    networks = [ip_network(each) for each in ranges]
    return any(ip_address(address) in network for address in own for network in networks)
