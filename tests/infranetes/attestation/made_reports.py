# SPDX-License-Identifier: Apache-2.0
"""Reports as processors make them, without signatures."""

from __future__ import annotations

import struct

MEASUREMENT = bytes(range(48))


def snp_report(bound: bytes, *, policy: int = 0x30000, version: int = 3) -> bytes:
    """Return an ATTESTATION_REPORT of AMD's."""
    report = bytearray(1184)
    struct.pack_into("<IIQ", report, 0, version, 0, policy)
    report[0x50:0x90] = bound
    report[0x90:0xC0] = MEASUREMENT
    return bytes(report)


def tdx_quote(bound: bytes, *, attributes: int = 0, version: int = 4, kind: int = 0x81) -> bytes:
    """Return a quote of Intel's, of version 4 or 5, with a TD report 1.0 in it."""
    header = struct.pack("<HHI40x", version, 2, kind)
    body = bytearray(584)
    struct.pack_into("<Q", body, 120, attributes)
    body[136:184] = MEASUREMENT
    body[520:584] = bound
    kinds = struct.pack("<HI", 2, len(body)) if version == 5 else b""
    return header + kinds + bytes(body) + struct.pack("<I", 0)
