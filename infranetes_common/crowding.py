# SPDX-License-Identifier: Apache-2.0
"""Which client's connection gives way where there are too many: one of whoever has most."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.interfaces import IAddress

C = TypeVar("C")


def source_of(peer: IAddress | None) -> str:
    """Return whom a connection counts as: its address, of IPv6 the network of 64 bits, or all of loopback."""
    if not isinstance(peer, IPv4Address | IPv6Address):
        return ""
    try:
        address = ipaddress.ip_address(peer.host.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return "loopback"
    return str(address) if address.version == 4 else str(int(address) >> 64)


def one_too_many(waiting: Sequence[C], source: Callable[[C], str]) -> C:
    """Return the connection that gives way: the one that has waited longest of the source that has most.

    :param waiting: those that may give way, the longest waiting first; at least one."""
    most = max(Counter(map(source, waiting)).items(), key=lambda each: each[1])[0]
    return next(each for each in waiting if source(each) == most)
