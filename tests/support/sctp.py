# SPDX-License-Identifier: Apache-2.0
"""The packet that begins an SCTP association (RFC 9260), for kernels without SCTP."""

from __future__ import annotations

import secrets
import struct

PROTOCOL = 132


def init(port: int) -> tuple[bytes, bytes]:
    """Return an INIT packet to a port, and its tag, by which it is recognized wherever it arrives."""
    source, tag = secrets.randbelow(20_000) + 20_000, secrets.token_bytes(4)
    chunk = struct.pack("!BBH", 1, 0, 20) + tag + struct.pack("!IHHI", 65536, 1, 1, 1)
    packet = struct.pack("!HHI", source, port, 0) + b"\0\0\0\0" + chunk
    return packet[:8] + struct.pack("<I", _crc32c(packet)) + packet[12:], tag


def port(packet: bytes) -> int:
    """Return the port that a packet is sent to. :raise ValueError: its checksum is wrong."""
    if struct.unpack("<I", packet[8:12])[0] != _crc32c(packet[:8] + b"\0\0\0\0" + packet[12:]):
        raise ValueError("an SCTP packet has another checksum than its content")
    return int.from_bytes(packet[2:4], "big")


def _crc32c(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF
