# SPDX-License-Identifier: Apache-2.0
"""What a processor's report on a confidential VM is bound to."""

from __future__ import annotations

import hashlib

LEAST_NONCE, MOST_NONCE = 32, 64  # bytes
MOST_REPORT = 64 * 1024  # bytes, of the report and of what comes with it alike


def binding(nonce: bytes, key: str) -> bytes:
    """Return the 64 bytes that the report on a VM has: they are those of no other call, and of no other VM.

    :param key: of the certificate of the VM's agent: the SHA-256 of its SubjectPublicKeyInfo, hex."""
    return hashlib.sha512(b"infranetes attestation 1\0" + nonce + key.encode()).digest()
