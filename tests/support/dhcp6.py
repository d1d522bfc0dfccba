# SPDX-License-Identifier: Apache-2.0
"""Solicitations of routers and DHCPv6 as clients write and read them, by the figures of RFC 4861 and 8415."""

from __future__ import annotations

import struct
from ipaddress import IPv6Address

import attrs

from tests.support.frames import IPV6, internet_sum, mac

SOLICIT, ADVERTISE, REQUEST, CONFIRM, RENEW, REBIND, REPLY, RELEASE, DECLINE = range(1, 10)
INFORMATION = 11
ICMP, UDP = 58, 17
ALL_ROUTERS, ALL_SERVERS = "ff02::2", "ff02::1:2"
CLIENT_ID = b"\0\3\0\1client"


def packet(
    sender: str, source: str, to: str, protocol: int, payload: bytes, hops: int = 255, to_mac: str = ""
) -> bytes:
    """Return a frame with UDP or ICMPv6, whose checksum is filled in."""
    addresses = IPv6Address(source).packed + IPv6Address(to).packed
    place = 2 if protocol == ICMP else 6
    total = summed(addresses, protocol, payload) or 0xFFFF
    payload = payload[:place] + total.to_bytes(2, "big") + payload[place + 2 :]
    head = struct.pack("!IHBB", 6 << 28, len(payload), protocol, hops) + addresses
    receiver = mac(to_mac) if to_mac else b"\x33\x33" + IPv6Address(to).packed[12:]
    return receiver + mac(sender) + IPV6.to_bytes(2, "big") + head + payload


def summed(addresses: bytes, protocol: int, payload: bytes) -> int:
    """Return the checksum of a payload: 0 if it contains its own."""
    pseudo = addresses + struct.pack("!II", len(payload), protocol)
    return internet_sum(pseudo + payload + bytes(len(payload) % 2))


def solicitation(sender: str, source: str, hops: int = 255) -> bytes:
    """Return the frame in which a host asks for routers."""
    return packet(sender, source, ALL_ROUTERS, ICMP, struct.pack("!BBHI", 133, 0, 0, 0), hops)


def option(code: int, value: bytes) -> bytes:
    """Return an option of DHCPv6."""
    return struct.pack("!HH", code, len(value)) + value


def association(*addresses: str) -> bytes:
    """Return an association with these addresses."""
    named = (option(5, IPv6Address(each).packed + bytes(8)) for each in addresses)
    return option(3, b"iaid" + bytes(8) + b"".join(named))


def asked(
    sender: str, source: str, kind: int, *options: bytes, client: bool = True, port: int = 547
) -> bytes:
    """Return the frame in which a client asks."""
    said = bytes([kind]) + b"txn" + (option(1, CLIENT_ID) if client else b"") + b"".join(options)
    datagram = struct.pack("!HHHH", 546, port, 8 + len(said), 0) + said
    return packet(sender, source, ALL_SERVERS, UDP, datagram, 1)


@attrs.frozen
class Reply:
    """What was sent to a client. :ivar options: of DHCPv6, or of an advertisement, by their codes."""

    to_mac: str
    source: str
    to: str
    protocol: int
    kind: int
    head: bytes  # of an advertisement, or the transaction
    options: dict[int, list[bytes]]


def read(frame: bytes) -> Reply:
    """Read a frame, and check what every client checks."""
    assert frame[12:14] == IPV6.to_bytes(2, "big")
    head, payload = frame[14:54], frame[54:]
    length, protocol, hops = struct.unpack_from("!HBB", head, 4)
    assert length == len(payload), (length, len(payload))
    assert hops == 255
    assert summed(head[8:40], protocol, payload) == 0, "the checksum"
    source, to = str(IPv6Address(head[8:24])), str(IPv6Address(head[24:40]))
    options: dict[int, list[bytes]] = {}
    if protocol == ICMP:
        rest = payload[16:]
        while rest:
            options.setdefault(rest[0], []).append(rest[2 : 8 * rest[1]])
            rest = rest[8 * rest[1] :]
        return Reply(frame[:6].hex(":"), source, to, protocol, payload[0], payload[4:16], options)
    assert struct.unpack_from("!HHH", payload) == (547, 546, len(payload))
    for code, value in options_of(payload[12:]):
        options.setdefault(code, []).append(value)
    return Reply(frame[:6].hex(":"), source, to, protocol, payload[8], payload[9:12], options)


def options_of(area: bytes) -> list[tuple[int, bytes]]:
    """Return DHCPv6's options in their order."""
    found = []
    while area:
        code, length = struct.unpack_from("!HH", area)
        found.append((code, area[4 : 4 + length]))
        area = area[4 + length :]
    return found
