# SPDX-License-Identifier: Apache-2.0
"""The pods' subnet and the addresses in it."""

from __future__ import annotations

from collections.abc import Container
from ipaddress import IPv4Address, IPv4Network, IPv6Network

from infranetes_common.addresses import parse_network
from infranetes_common.errors import InvalidArgument, ResourceExhausted

_LONGEST = 30  # leaves room for one pod beside the node
_SHORTEST = 8


def subnet(pod_cidr: str) -> IPv4Network:
    """Parse the IPv4 subnet out of `pod_cidr`, which may list networks of both families, separated by commas.

    :raise InvalidArgument: malformed, or without one IPv4 network that can serve pods.
    """
    try:
        networks = [parse_network(part.strip()) for part in pod_cidr.split(",")]
    except ValueError as error:
        raise InvalidArgument(f"pod CIDR {pod_cidr[:80]!r}: {error}") from None
    if any("/" not in part for part in pod_cidr.split(",")):
        raise InvalidArgument(
            f"pod CIDR {pod_cidr[:80]!r}: the length of the prefix is missing, as in 10.88.0.0/16"
        )
    usable = [network for network in networks if not isinstance(network, IPv6Network)]
    if len(usable) != 1:
        raise InvalidArgument(f"pod CIDR {pod_cidr[:80]!r}: QEMU's pods need one IPv4 network")
    [network] = usable
    if not _SHORTEST <= network.prefixlen <= _LONGEST:
        raise InvalidArgument(f"pod CIDR {network}: the prefix has to be /{_SHORTEST} to /{_LONGEST}")
    if network.is_multicast or network.is_loopback or network.is_link_local or network.is_unspecified:
        raise InvalidArgument(f"pod CIDR {network}: pods can't have such addresses")
    return network


def gateway(network: IPv4Network) -> IPv4Address:
    """Return the node's own address in the pods' subnet."""
    return network[1]


def free_address(
    network: IPv4Network, taken: Container[IPv4Address], last: IPv4Address | None
) -> IPv4Address:
    """Return the next address after `last` that is not taken: one that was given back is used again last.

    :raise ResourceExhausted: all are taken.
    """
    # Leaves out the network's, the gateway's and the broadcast address.
    first, end = 2, network.num_addresses - 1
    count = end - first
    begin = (
        int(last) - int(network.network_address) + 1 - first if last is not None and last in network else 0
    )
    for step in range(count):
        address = network[first + (begin + step) % count]
        if address not in taken:
            return address
    raise ResourceExhausted(
        f"all {count} addresses for pods in {network} are taken; remove pods, or give a larger pod CIDR"
    )


def mac_of(address: IPv4Address) -> str:
    """Return the locally administered MAC of an address. It never changes, so ARP caches do not go stale."""
    return ":".join(f"{byte:02x}" for byte in (0x0A, 0x58, *address.packed))
