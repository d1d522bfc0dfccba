# SPDX-License-Identifier: Apache-2.0
"""Addresses for pods, out of one IPv4 subnet."""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import IPv4Address, IPv4Network

from infranetes_common.errors import InvalidArgument, ResourceExhausted

MAX_PREFIX = 30  # network, gateway, one pod, broadcast


def subnet(cidr: str) -> IPv4Network:
    """Parse a pod CIDR. :raise InvalidArgument: not an IPv4 subnet with room for a pod."""
    try:
        network = IPv4Network(cidr)
    except ValueError as error:
        raise InvalidArgument(f"pod CIDR {cidr!r} is not an IPv4 subnet: {error}") from None
    if network.prefixlen > MAX_PREFIX:
        raise InvalidArgument(f"pod CIDR {cidr!r} has no room for a pod: /{MAX_PREFIX} is the smallest")
    return network


def free_address(network: IPv4Network, taken: Collection[str], after: str = "") -> str:
    """Return the next address after `after` that is not taken, starting over at the end of the subnet.

    So an address that was just given back is the last to be used again. The subnet's first is the gateway's.

    :raise ResourceExhausted: all are taken.
    """
    first, last = int(network.network_address) + 2, int(network.broadcast_address) - 1
    count = last - first + 1
    start = int(IPv4Address(after)) + 1 - first if after else 0
    for step in range(count):
        address = str(IPv4Address(first + (start + step) % count))
        if address not in taken:
            return address
    raise ResourceExhausted(f"all {count} addresses of pod CIDR {network} are taken; remove pods")
