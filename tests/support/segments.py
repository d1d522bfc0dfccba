# SPDX-License-Identifier: Apache-2.0
"""Segments of TCP and other protocols, and fragments of IPv4, as one that forges them sends them.

RFC 791, 2784, 4340, 9260 and 9293.
"""

from __future__ import annotations

import struct
from ipaddress import IPv4Address

from infranetes_common.identity import AGENT_PORT
from tests.support.frames import internet_sum

MORE_FRAGMENTS = 0x2000  # in a header's field for flags and offset
_SYN = 2


def syn(source: str, to: str, port: int = AGENT_PORT) -> bytes:
    """Return the first segment of a connection, 28 bytes, so that it may be two fragments."""
    segment = struct.pack("!HHIIBBHHH", 40000, port, 7, 0, 7 << 4, _SYN, 1024, 0, 0) + b"\2\4\5\xb4\1\1\1\0"
    pseudo = IPv4Address(source).packed + IPv4Address(to).packed + struct.pack("!HH", 6, len(segment))
    return segment[:16] + struct.pack("!H", internet_sum(pseudo + segment)) + segment[18:]


def sctp_init(source: str, to: str, port: int) -> bytes:
    """Return the packet that begins an association of SCTP."""
    chunk = struct.pack("!BBHIIHHI", 1, 0, 20, 7, 65536, 1, 1, 7)
    head = struct.pack("!HHI", 40000, port, 0)
    return head + struct.pack("<I", _crc32c(head + bytes(4) + chunk)) + chunk


def dccp_request(source: str, to: str, port: int) -> bytes:
    """Return the packet that begins a connection of DCCP."""
    segment = struct.pack("!HHBBHBBHII", 40000, port, 5, 0, 0, 1, 0, 0, 7, 0)
    pseudo = IPv4Address(source).packed + IPv4Address(to).packed + struct.pack("!HH", 33, len(segment))
    return segment[:6] + struct.pack("!H", internet_sum(pseudo + segment)) + segment[8:]


def gre(source: str, to: str, number: int) -> bytes:
    """Return a packet of GRE; of its connection, only the addresses are known."""
    return struct.pack("!HHI", 0, 0x0800, number)  # the kernel drops one of less than 8 bytes


def _crc32c(data: bytes) -> int:
    remainder = 0xFFFFFFFF
    for byte in data:
        remainder ^= byte
        for _ in range(8):
            remainder = remainder >> 1 ^ (0x82F63B78 if remainder & 1 else 0)
    return remainder ^ 0xFFFFFFFF


def packet(
    source: str, to: str, payload: bytes, fragment: int = 0, options: bytes = b"", number: int = 77
) -> bytes:
    """Return an IPv4 packet of TCP. :param fragment: the header's field for flags and offset."""
    length = 20 + len(options)
    head = struct.pack("!BBHHHBBH", 0x40 | length // 4, 0, length + len(payload), 77, fragment, 64, 6, 0) + (
        IPv4Address(source).packed + IPv4Address(to).packed + options
    )
    return head[:10] + internet_sum(head).to_bytes(2, "big") + head[12:] + payload
