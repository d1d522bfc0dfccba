# SPDX-License-Identifier: Apache-2.0
"""The node's rule for each address, protocol and port of Kubernetes' Services."""

from __future__ import annotations

from collections.abc import Sequence
from socket import AF_INET, AF_INET6, inet_ntop
from typing import NamedTuple

import attrs

from infranetes_common.addresses import parse_network
from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import vmserver as messages

MAX_ENDPOINTS = 10_000  # per rule
MAX_RANGES = 1000
MAX_AFFINITY_SECONDS = 86400
PROTOCOLS = {6: "tcp", 17: "udp", 132: "sctp"}


class Key(NamedTuple):
    """The destination of a connection. The address and protocol are written as nft writes them."""

    version: int
    address: str
    protocol: str
    port: int


class Target(NamedTuple):
    """An endpoint."""

    address: str
    port: int


@attrs.frozen
class Rule:
    """The treatment of connections to a key.

    :ivar endpoints: the targets, chosen evenly. :ivar dropped: without endpoints, drop; else refuse.
    :ivar cluster_ip: True to refuse connections to other ports of this address.
    :ivar affinity_seconds: how long a client keeps its endpoint; 0 for no affinity.
    :ivar source_ranges: drop connections unless the pod has an address in these ranges. None: never drop.
    """

    endpoints: tuple[Target, ...] = ()
    dropped: bool = False
    cluster_ip: bool = False
    affinity_seconds: int = 0
    source_ranges: tuple[str, ...] = ()


def key(message: messages.ServiceKey) -> Key:
    """Read a key. :raise InvalidArgument: it is none."""
    address = _address(message.address)
    if message.protocol not in PROTOCOLS or not 0 < message.port < 65536:
        raise InvalidArgument(f"a Service can't have port {message.port} of IP protocol {message.protocol}")
    return Key(4 if len(message.address) == 4 else 6, address, PROTOCOLS[message.protocol], message.port)


def rule(message: messages.ServiceRule) -> Rule:
    """Read a rule. :raise InvalidArgument: it is none."""
    version = len(message.key.address)
    if len(message.endpoints) > MAX_ENDPOINTS:
        raise InvalidArgument(f"a rule has at most {MAX_ENDPOINTS} endpoints")
    if message.affinity_seconds > MAX_AFFINITY_SECONDS:
        raise InvalidArgument(f"affinity lasts at most {MAX_AFFINITY_SECONDS} s")
    if any(len(each.address) != version or not 0 < each.port < 65536 for each in message.endpoints):
        raise InvalidArgument("an endpoint has to have an address of the Service's family, and a port")
    return Rule(
        tuple(Target(_address(each.address), each.port) for each in message.endpoints),
        message.dropped,
        message.cluster_ip,
        message.affinity_seconds,
        ranges(message.source_ranges),
    )


def _address(packed: bytes) -> str:
    if len(packed) not in (4, 16):
        raise InvalidArgument(f"an address has 4 or 16 bytes, not {len(packed)}")
    # As nft writes it, which `ipaddress` does not with an IPv4 address in an IPv6 one, and in a tenth of its
    # time: a large cluster has 60,000 addresses.
    return inet_ntop(AF_INET if len(packed) == 4 else AF_INET6, packed)


def ranges(texts: Sequence[str]) -> tuple[str, ...]:
    """Read ranges of addresses. :raise InvalidArgument: they are none, or too many."""
    if len(texts) > MAX_RANGES:
        raise InvalidArgument(f"there are at most {MAX_RANGES} ranges of addresses, not {len(texts)}")
    try:
        return tuple(str(parse_network(text)) for text in texts)
    except ValueError as error:
        raise InvalidArgument(f"a range of addresses can't be read: {error}") from None
