# SPDX-License-Identifier: Apache-2.0
"""ICMP errors, as one that forges them sends them (RFC 792)."""

from __future__ import annotations

import socket
import struct
from ipaddress import IPv4Address

from tests.support.frames import internet_sum
from tests.support.sctp import PROTOCOL as SCTP

UNREACHABLE, QUENCH, REDIRECT, EXCEEDED, PARAMETER = 3, 4, 5, 11, 12  # types
PORT, TOO_LARGE = 3, 4  # codes of UNREACHABLE
PROTOCOLS = (socket.IPPROTO_UDP, socket.IPPROTO_TCP, SCTP)

End = tuple[str, int]
"""An address and a port."""


def quoted(source: End, to: End, protocol: int, data: bytes = b"") -> bytes:
    """Return the packet that an error quotes."""
    body = struct.pack("!HHHH", source[1], to[1], 8 + len(data), 0) + data
    if protocol == socket.IPPROTO_TCP:
        body = struct.pack("!HHIIBBHHH", source[1], to[1], 1, 1, 5 << 4, 0x10, 1024, 0, 0) + data
    ends = IPv4Address(source[0]).packed + IPv4Address(to[0]).packed
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 9, 0, 64, protocol, 0) + ends
    return head[:10] + internet_sum(head).to_bytes(2, "big") + head[12:] + body


def error(kind: int, code: int, quote: bytes, rest: int = 0) -> bytes:
    """Return an ICMP error. :param rest: the second word of its header, such as a path MTU."""
    message = struct.pack("!BBHI", kind, code, 0, rest) + quote
    return message[:2] + internet_sum(message).to_bytes(2, "big") + message[4:]
