# SPDX-License-Identifier: Apache-2.0
"""The node's message about a pod's firewall."""

from __future__ import annotations

import itertools

from infranetes_common.addresses import Network, parse_network
from infranetes_common.errors import InvalidArgument
from infranetes_common.pod_firewall import Allowed, PodFirewall, Ports
from infranetes_common.wire import vmserver as messages

MAX_RULES = 5_000  # per direction
MAX_NETWORKS = 100_000  # per direction, counted again in each rule that has them
MAX_PORTS = 10_000
PROTOCOLS = {6: "TCP", 17: "UDP", 132: "SCTP"}


def as_firewall(request: messages.SetFirewallRequest) -> PodFirewall:
    """Read a firewall. :raise InvalidArgument: it is none."""
    return PodFirewall(
        _way(request.ingress) if request.HasField("ingress") else None,
        _way(request.egress) if request.HasField("egress") else None,
    )


def _way(way: messages.FirewallWay) -> tuple[Allowed, ...]:
    if (
        len(way.rules) > MAX_RULES
        or sum(len(rule.networks) for rule in way.rules) > MAX_NETWORKS
        or sum(len(rule.ports) for rule in way.rules) > MAX_PORTS
    ):
        raise InvalidArgument(
            f"a firewall has at most {MAX_RULES} rules, {MAX_NETWORKS} networks and {MAX_PORTS} ports"
        )
    return tuple(
        Allowed(
            _networks(rule), None if rule.all_ports else tuple(sorted(_ports(each) for each in rule.ports))
        )
        for rule in way.rules
    )


def _networks(rule: messages.FirewallRule) -> tuple[Network, ...]:
    try:
        networks = sorted((parse_network(text) for text in rule.networks), key=_order)
    except ValueError as error:
        raise InvalidArgument(f"a network of a firewall can't be read: {error}") from None
    for one, following in itertools.pairwise(networks):
        if one.version == following.version and one.overlaps(following):
            raise InvalidArgument(f"networks of a firewall overlap: {one} and {following}")
    return tuple(networks)


def _order(network: Network) -> tuple[int, int]:
    return network.version, int(network.network_address)


def _ports(ports: messages.FirewallPorts) -> Ports:
    if ports.protocol not in PROTOCOLS or not 0 < ports.first <= ports.last < 65536:
        raise InvalidArgument(
            f"a firewall can't have ports {ports.first} to {ports.last} of IP protocol {ports.protocol}"
        )
    return Ports(PROTOCOLS[ports.protocol], ports.first, ports.last)
