# SPDX-License-Identifier: Apache-2.0
"""UDP datagrams in IPv4 packets in Ethernet frames, as a tap carries them."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address

import attrs

SERVER_PORT, CLIENT_PORT = 67, 68
_IPV4 = b"\x08\x00"
_UDP = 17
_ETHERNET, _SHORTEST, _UDP_HEADER = 14, 20, 8  # bytes of headers
_FRAGMENT = 0x3FFF  # more fragments, and the offset; not the bit that forbids them
_TTL = 64


class Malformed(Exception):
    """What was received is not what it should be."""


@attrs.frozen
class Datagram:
    """A UDP datagram, with the Ethernet addresses of the frame that carries it."""

    sender: bytes  # Ethernet
    receiver: bytes
    source: IPv4Address
    destination: IPv4Address
    source_port: int
    destination_port: int
    payload: bytes


def decode(frame: bytes) -> Datagram:
    """Read a frame. :raise Malformed: it has no whole UDP datagram in IPv4, or a checksum is wrong."""
    packet = memoryview(frame)[_ETHERNET:]
    if frame[12:_ETHERNET] != _IPV4 or len(packet) < _SHORTEST or packet[0] >> 4 != 4:
        raise Malformed("no IPv4")
    header, total = (packet[0] & 0xF) * 4, int.from_bytes(packet[2:4], "big")
    if header < _SHORTEST or not header + _UDP_HEADER <= total <= len(packet):
        raise Malformed("a length of IPv4")
    if int.from_bytes(packet[6:8], "big") & _FRAGMENT or packet[9] != _UDP:
        raise Malformed("a fragment, or no UDP")
    if checksum(packet[:header]):
        raise Malformed("the checksum of IPv4")
    datagram = packet[header:total]
    source_port, destination_port, length, claimed = struct.unpack_from("!HHHH", datagram)
    if not _UDP_HEADER <= length <= len(datagram):
        raise Malformed("the length of UDP")
    datagram, addresses = datagram[:length], bytes(packet[12:20])
    if claimed and checksum(_pseudo_header(addresses, length) + datagram):
        raise Malformed("the checksum of UDP")
    return Datagram(
        frame[6:12],
        frame[:6],
        IPv4Address(addresses[:4]),
        IPv4Address(addresses[4:]),
        source_port,
        destination_port,
        bytes(datagram[_UDP_HEADER:]),
    )


def encode(datagram: Datagram) -> bytes:
    """Return the frame. Its payload has at most what fits into an unfragmented packet."""
    length = _UDP_HEADER + len(datagram.payload)
    addresses = datagram.source.packed + datagram.destination.packed
    ports = struct.pack("!HHH", datagram.source_port, datagram.destination_port, length)
    udp_sum = checksum(_pseudo_header(addresses, length) + ports + b"\0\0" + datagram.payload) or 0xFFFF
    header = struct.pack("!BBHHHBBH", 0x45, 0, _SHORTEST + length, 0, 0, _TTL, _UDP, 0)
    ip_sum = checksum(header + addresses)
    return b"".join((
        datagram.receiver,
        datagram.sender,
        _IPV4,
        header[:10],
        ip_sum.to_bytes(2, "big"),
        addresses,
        ports,
        udp_sum.to_bytes(2, "big"),
        datagram.payload,
    ))  # fmt: skip


def checksum(data: bytes | memoryview) -> int:
    """Return the internet checksum: 0 for data that contains its own and is whole."""
    if len(data) % 2:
        data = bytes(data) + b"\0"
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total >> 16) + (total & 0xFFFF)
    return ((total >> 16) + total & 0xFFFF) ^ 0xFFFF


def _pseudo_header(addresses: bytes, length: int) -> bytes:
    return addresses + struct.pack("!BBH", 0, _UDP, length)
