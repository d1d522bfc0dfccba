# SPDX-License-Identifier: Apache-2.0
"""The kernel's state for a rule.

A rule's endpoints are numbered, and a connection draws one of the numbers. With client affinity, where the
kernel remembers a client's number, an endpoint keeps its number as long as it exists, and a new endpoint
takes a free one. Without affinity the numbers count from 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address, ip_network

import attrs

from infranetes_common.service_proxy.rules import Rule, Target

REFUSED, DROPPED = "refused", "dropped"


@attrs.frozen
class Placement:
    """The elements of the tables for one key.

    :ivar chain: where its connections go: `spread-N`, `keep-N-SECONDS`, `refused` or `dropped`.
    :ivar slots: its endpoints by their numbers; None: the number is free.
    :ivar cluster_ip: its address is one of those whose other ports are refused.
    """

    chain: str
    slots: tuple[Target | None, ...] = ()
    cluster_ip: bool = False

    @property
    def numbered(self) -> dict[int, Target]:
        """Its endpoints by their numbers, in order."""
        return {number: target for number, target in enumerate(self.slots) if target is not None}

    @property
    def affinity_seconds(self) -> int:
        """The time in seconds that a client stays with an endpoint; 0 without affinity."""
        return int(self.chain.rpartition("-")[2]) if self.chain.startswith("keep-") else 0


def place(rule: Rule, own: Iterable[str], before: Placement | None) -> Placement:
    """Return the elements for a rule.

    :param own: the pod's addresses. :param before: what the kernel has for this key now.
    """
    if rule.source_ranges and not _allowed(rule.source_ranges, own):
        return Placement(DROPPED, cluster_ip=rule.cluster_ip)
    if not rule.endpoints:
        return Placement(DROPPED if rule.dropped else REFUSED, cluster_ip=rule.cluster_ip)
    slots = before.slots if before is not None else ()
    count, seconds = len(set(rule.endpoints)), rule.affinity_seconds
    if seconds:
        return Placement(f"keep-{count}-{seconds}", _kept(rule.endpoints, slots), rule.cluster_ip)
    return Placement(f"spread-{count}", _kept(rule.endpoints, slots[:count]), rule.cluster_ip)


def _kept(wanted: Iterable[Target], before: Iterable[Target | None]) -> tuple[Target | None, ...]:
    """Number endpoints: existing ones keep their numbers, new ones get the lowest that are free."""
    given = dict.fromkeys(wanted)
    slots = [target if target in given else None for target in before]
    there = set(slots)
    new = (target for target in given if target not in there)
    slots = [next(new, None) if target is None else target for target in slots]
    slots.extend(new)
    while slots and slots[-1] is None:
        slots.pop()
    return tuple(slots)


def _allowed(ranges: Iterable[str], own: Iterable[str]) -> bool:
    networks = [ip_network(each) for each in ranges]
    return any(ip_address(address) in network for address in own for network in networks)
