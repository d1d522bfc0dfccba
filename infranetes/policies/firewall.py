# SPDX-License-Identifier: Apache-2.0
"""Turning the rules of a pod's policies into its firewall.

All peers that are allowed on the same ports become one Allowed, whichever policies allow them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from ipaddress import IPv4Network, IPv6Network
from itertools import chain

import attrs

from infranetes.policies.addresses import merged, networks, ordered, runs
from infranetes.policies.objects import Block, NamedPort, PodPeer, PortName, Rule, Steps
from infranetes.policies.selections import Criterion, Selection
from infranetes.policies.slots import Mask, Slots
from infranetes_common.addresses import Network
from infranetes_common.pod_firewall import Allowed, Ports

# The parts of a group's addresses: groups of equal parts have equal addresses.
Parts = tuple[Mask, frozenset[Block]]
PortsKey = tuple[Ports, ...] | None

EVERYWHERE: tuple[Network, ...] = (IPv4Network("0.0.0.0/0"), IPv6Network("::/0"))
STEP = 200  # peers handled at a time


@attrs.define
class _Group:
    """The peers that are allowed on the same ports."""

    everyone: bool = False
    blocks: set[Block] = attrs.field(factory=set)
    pods: Mask = 0


class FirewallMaker:
    """Makes both directions of a pod's firewall.

    :param select: returns the selection of a peer or port name, in small steps.
    :param slots: the slots that the selections use.
    :param unions: a cache of the networks of firewalls, by their parts; this firewall's are added to it.
    :ivar used: the keys of `unions` that this firewall uses.
    """

    def __init__(
        self,
        select: Callable[[Criterion], Steps[Selection]],
        slots: Slots,
        unions: dict[Parts, tuple[Network, ...]],
    ) -> None:
        self._select = select
        self._slots = slots
        self._unions = unions
        self.used: set[Parts] = set()

    def ingress(self, rules: Iterable[Rule], own: Sequence[NamedPort]) -> Steps[tuple[Allowed, ...] | None]:
        """Return what the rules allow a pod with these named ports to receive; None: everything."""
        groups: dict[PortsKey, _Group] = {}
        for rule in rules:
            ports = rule.ports
            if ports is not None:
                ports = joined(chain.from_iterable(_numbers(each, own) for each in ports))
            if ports is None or ports:
                yield from self._allow(groups, ports, rule)
        return (yield from self._allowed(groups))

    def egress(self, rules: Iterable[Rule]) -> Steps[tuple[Allowed, ...] | None]:
        """Return what the rules allow a pod to send; None: everything.

        Named ports are those of the other pod."""
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
        yield
        for number, peer in enumerate(rule.peers or ()):
            if isinstance(peer, Block):
                group.blocks.add(peer)
            else:
                selection = yield from self._select(peer)
                group.pods |= selection.mask
            if number % STEP == STEP - 1:
                yield

    def _allow_named(self, groups: dict[PortsKey, _Group], port: PortName, rule: Rule) -> Steps[None]:
        """Allow those of the rule's peers that have a port of this name, each on that port's number."""
        for peer in (None,) if rule.peers is None else rule.peers:
            selection = yield from self._select(peer if isinstance(peer, PodPeer) else port)
            within = peer if isinstance(peer, Block) else None
            its = yield from selection.named(port, within)
            for number, mask in its.items():
                groups.setdefault((Ports(port.protocol, number, number),), _Group()).pods |= mask

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
        parts = (group.pods, frozenset(group.blocks))
        self.used.add(parts)
        found = self._unions.get(parts)
        yield
        if found is None:
            ranges = runs((yield from ordered((yield from self._slots.addresses(group.pods)))))
            yield
            if group.blocks:
                ranges = yield from merged(chain(ranges, *(block.ranges for block in group.blocks)))
            found = self._unions[parts] = yield from networks(ranges)
        return found


def _numbers(port: Ports | PortName, of: Sequence[NamedPort]) -> Iterable[Ports]:
    """Return the numbers of a port in a pod; none if the pod has no port of this name."""
    if isinstance(port, Ports):
        return (port,)
    return [Ports(each.protocol, each.number, each.number) for each in of if port.is_of(each)]


def joined(ports: Iterable[Ports]) -> tuple[Ports, ...]:
    """Return the same ports as sorted ranges, with a gap between any two of a protocol."""
    found: list[Ports] = []
    for each in sorted(ports):
        last = found[-1] if found else None
        if last is not None and last.protocol == each.protocol and each.first <= last.last + 1:
            found[-1] = Ports(last.protocol, last.first, max(last.last, each.last))
        else:
            found.append(each)
    return tuple(found)
