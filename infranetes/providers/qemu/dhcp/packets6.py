# SPDX-License-Identifier: Apache-2.0
"""UDP and ICMPv6 in IPv6 packets in Ethernet frames, without extension headers."""

from __future__ import annotations

import struct
from ipaddress import IPv6Address

import attrs

from infranetes.providers.qemu.dhcp.packets import Malformed, checksum

KIND = b"\x86\xdd"
ICMP, UDP = 58, 17
_ETHERNET, _HEADER = 14, 40  # bytes
_HOPS = 255  # as the messages of neighbours have


@attrs.frozen
class Packet:
    """A packet, with the Ethernet addresses of the frame that carries it.

    :ivar payload: of UDP or ICMPv6, with its header, in which the checksum is 0 for `encode`.
    """

    sender: bytes  # Ethernet
    receiver: bytes
    source: IPv6Address
    destination: IPv6Address
    protocol: int
    payload: bytes
    hops: int = _HOPS


def decode(frame: bytes) -> Packet:
    """Read a frame. :raise Malformed: it has no whole UDP or ICMPv6, or the checksum is wrong."""
    packet = frame[_ETHERNET:]
    if frame[12:_ETHERNET] != KIND or len(packet) < _HEADER or packet[0] >> 4 != 6:
        raise Malformed("no IPv6")
    length, protocol, hops = struct.unpack_from("!HBB", packet, 4)
    payload = packet[_HEADER : _HEADER + length]
    if protocol not in (ICMP, UDP) or len(payload) < max(length, 8):
        raise Malformed("neither UDP nor ICMPv6, or cut off")
    addresses = packet[8:_HEADER]
    if protocol == UDP and int.from_bytes(payload[4:6], "big") != length:
        raise Malformed("the length of UDP")
    if checksum(_pseudo_header(addresses, length, protocol) + payload):
        raise Malformed("the checksum")
    source, destination = IPv6Address(addresses[:16]), IPv6Address(addresses[16:])
    return Packet(frame[6:12], frame[:6], source, destination, protocol, payload, hops)


def encode(packet: Packet) -> bytes:
    """Return the frame."""
    addresses = packet.source.packed + packet.destination.packed
    length, payload = len(packet.payload), packet.payload
    total = checksum(_pseudo_header(addresses, length, packet.protocol) + payload) or 0xFFFF
    place = 6 if packet.protocol == UDP else 2
    payload = payload[:place] + total.to_bytes(2, "big") + payload[place + 2 :]
    header = struct.pack("!IHBB", 6 << 28, length, packet.protocol, packet.hops)
    return packet.receiver + packet.sender + KIND + header + addresses + payload


def _pseudo_header(addresses: bytes, length: int, protocol: int) -> bytes:
    return addresses + struct.pack("!II", length, protocol)
