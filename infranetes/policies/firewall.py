# SPDX-License-Identifier: Apache-2.0
"""The rules of policies, as what one pod may receive and send.

What is allowed to and from the same ports becomes one Allowed, whichever policies allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from ipaddress import IPv4Network, IPv6Network
from itertools import chain
from typing import TypeVar

import attrs

from infranetes.policies.addresses import Range, contains, merged, networks
from infranetes.policies.objects import Block, NamedPort, PodPeer, PortName, Rule
from infranetes.policies.selections import Selection, Wanted
from infranetes_common.pod_firewall import Allowed, Network, Ports

T = TypeVar("T")
Steps = Generator[None, None, T]
Sources = tuple[frozenset[Wanted], frozenset[Block]]
PortsKey = tuple[Ports, ...] | None

EVERYWHERE: tuple[Network, ...] = (IPv4Network("0.0.0.0/0"), IPv6Network("::/0"))
STEP = 200  # pods that are looked at at a time


@attrs.define
class _Group:
    """The other sides that may be connected by the same ports."""

    everyone: bool = False
    selections: dict[Wanted, Selection] = attrs.field(factory=dict)
    blocks: set[Block] = attrs.field(factory=set)
    ranges: list[Range] = attrs.field(factory=list)


class Firewalls:
    """Makes both directions of a pod's firewall.

    :param select: returns the selection of what is wanted, in small steps.
    :param unions: what other pods' firewalls have needed, while no pod has changed.
    """

    def __init__(
        self, select: Callable[[Wanted], Steps[Selection]], unions: dict[Sources, tuple[Network, ...]]
    ) -> None:
        self._select = select
        self._unions = unions

    def ingress(self, rules: Iterable[Rule], own: Sequence[NamedPort]) -> Steps[tuple[Allowed, ...] | None]:
        """What a pod with these ports may receive by rules; None: everything."""
        groups: dict[PortsKey, _Group] = {}
        for rule in rules:
            ports = rule.ports
            if ports is not None:
                ports = joined(chain.from_iterable(_numbers(each, own) for each in ports))
            if ports is None or ports:
                yield from self._allow(groups, ports, rule)
        return (yield from self._allowed(groups))

    def egress(self, rules: Iterable[Rule]) -> Steps[tuple[Allowed, ...] | None]:
        """What a pod may send by rules; None: everything. Of ports with names the other pod decides."""
        groups: dict[PortsKey, _Group] = {}
        for rule in rules:
            if rule.ports is None:
                yield from self._allow(groups, None, rule)
                continue
            numbers = joined(each for each in rule.ports if isinstance(each, Ports))
            if numbers:
                yield from self._allow(groups, numbers, rule)
            for each in rule.ports:
                if isinstance(each, PortName):
                    yield from self._allow_named(groups, each, rule)
        return (yield from self._allowed(groups))

    def _allow(self, groups: dict[PortsKey, _Group], ports: PortsKey, rule: Rule) -> Steps[None]:
        group = groups.setdefault(ports, _Group())
        if rule.peers is None:
            group.everyone = True
        for number, peer in enumerate(rule.peers or ()):
            if isinstance(peer, Block):
                group.blocks.add(peer)
            else:
                group.selections[peer] = yield from self._select(peer)
            if number % STEP == STEP - 1:
                yield

    def _allow_named(self, groups: dict[PortsKey, _Group], port: PortName, rule: Rule) -> Steps[None]:
        """Allow the pods among the rule's peers that have a port of this name, each with its number."""
        peers, selections = rule.peers or (), []
        for peer in peers:
            if isinstance(peer, PodPeer):
                selections.append((yield from self._select(peer)))
        blocks = merged(chain.from_iterable(each.ranges for each in peers if isinstance(each, Block)))
        holders = yield from self._select(port)
        for number, pod in enumerate(holders.members.values()):
            if rule.peers is None or any(pod.name in each.members for each in selections):
                its: Sequence[Range] = pod.addresses
            else:
                its = [each for each in pod.addresses if contains(blocks, each)]
            for ports in _numbers(port, pod.ports) if its else ():
                groups.setdefault((ports,), _Group()).ranges.extend(its)
            if number % STEP == STEP - 1:
                yield

    def _allowed(self, groups: dict[PortsKey, _Group]) -> Steps[tuple[Allowed, ...] | None]:
        found = []
        for ports in sorted(groups, key=lambda each: (each is not None, each or ())):
            other_sides = yield from self._networks(groups[ports])
            if ports is None and other_sides == EVERYWHERE:
                return None
            if other_sides:
                found.append(Allowed(other_sides, ports))
        return tuple(found)

    def _networks(self, group: _Group) -> Steps[tuple[Network, ...]]:
        if group.everyone:
            return EVERYWHERE
        if len(group.selections) == 1 and not group.blocks and not group.ranges:
            (selection,) = group.selections.values()
            return (yield from selection.networks())
        sources = (frozenset(group.selections), frozenset(group.blocks))
        if not group.ranges and sources in self._unions:
            return self._unions[sources]
        ranges = list(group.ranges)
        for selection in group.selections.values():
            ranges += (each for pod in selection.members.values() for each in pod.addresses)
            yield
        for block in group.blocks:
            ranges += block.ranges
        found = yield from networks(ranges)
        if not group.ranges:
            self._unions[sources] = found
        return found


def _numbers(port: Ports | PortName, of: Sequence[NamedPort]) -> Iterable[Ports]:
    """The numbers that a port has in a pod; a name that the pod does not have means none."""
    if isinstance(port, Ports):
        return (port,)
    named = (each for each in of if (each.name, each.protocol) == (port.name, port.protocol))
    return {Ports(each.protocol, each.number, each.number) for each in named}


def joined(ports: Iterable[Ports]) -> tuple[Ports, ...]:
    """Return the same ports, sorted, with a gap between any two ranges of a protocol."""
    found: list[Ports] = []
    for each in sorted(ports):
        last = found[-1] if found else None
        if last is not None and last.protocol == each.protocol and each.first <= last.last + 1:
            found[-1] = Ports(last.protocol, last.first, max(last.last, each.last))
        else:
            found.append(each)
    return tuple(found)
