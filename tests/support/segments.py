# SPDX-License-Identifier: Apache-2.0
"""Segments of TCP and fragments of IPv4 (RFC 791, 9293), as one that forges them sends them."""

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


def packet(
    source: str, to: str, payload: bytes, fragment: int = 0, options: bytes = b"", number: int = 77
) -> bytes:
    """Return an IPv4 packet of TCP. :param fragment: the header's field for flags and offset."""
    length = 20 + len(options)
    head = struct.pack("!BBHHHBBH", 0x40 | length // 4, 0, length + len(payload), 77, fragment, 64, 6, 0) + (
        IPv4Address(source).packed + IPv4Address(to).packed + options
    )
    return head[:10] + internet_sum(head).to_bytes(2, "big") + head[12:] + payload
