# SPDX-License-Identifier: Apache-2.0
"""IP addresses and networks in texts of others, and in nft's rules.

An IPv6 address may end with a zone, of any characters (RFC 4007): ``ipaddress`` takes ``fe80::1%x }; flush
ruleset`` for an address. A zone names an interface of one machine, so no address that Kubernetes or another
machine tells has one.
"""

from __future__ import annotations

import ipaddress
import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import TypeAlias

from infranetes_common.errors import InvalidArgument

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

_LONGEST = 60  # characters; an address with a prefix has at most 49
_WRITTEN = re.compile(r"[0-9A-Fa-f.:]{2,45}(/[0-9]{1,3})?")


def parse_address(text: str) -> Address:
    """Parse an address. :raise ValueError: it is none, or has a zone."""
    return ipaddress.ip_address(_without_zone(text))


def parse_network(text: str, strict: bool = True) -> Network:
    """Parse a network, or a single address, which is one too.

    :param strict: whether a network whose address has bits behind the prefix is refused.
    :raise ValueError: it is none, or has a zone.
    """
    network = ipaddress.ip_network(_without_zone(text), strict=False)
    if strict and network.network_address != ipaddress.ip_address(text.partition("/")[0]):
        raise ValueError(f"{text[:_LONGEST]} has host bits set; did you mean {network}?")
    return network


def nft_address(value: Address | Network | str) -> str:
    """Return an address or a network as nft reads it. All that go into a rule are written by this.

    :raise InvalidArgument: nft might read something else in it.
    """
    text = str(value)
    if not _WRITTEN.fullmatch(text):
        raise InvalidArgument(f"{text[:_LONGEST]!r} is no address that a packet filter's rule can have")
    return text


def _without_zone(text: str) -> str:
    if "%" in text:
        raise ValueError(f"{text[:_LONGEST]!r} has a zone, which names an interface of one machine")
    return text
