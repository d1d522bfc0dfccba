# SPDX-License-Identifier: Apache-2.0
"""SSH's public keys as text: what a line of an authorized_keys file has."""

from __future__ import annotations

import base64
import binascii
import re

MAX_KEY = 16 * 1024  # characters of a line; the longest RSA keys have 2,800

_LINE = re.compile(
    r"""(?P<options>(?:[A-Za-z0-9-]+(?:="(?:[^"\\]|\\.)*")?)(?:,[A-Za-z0-9-]+(?:="(?:[^"\\]|\\.)*")?)*\ +)??
        (?P<type>ssh-(?:rsa|dss|ed25519)|ecdsa-sha2-nistp(?:256|384|521)|sk-(?:ssh-ed25519|ecdsa-sha2-nistp256)@openssh\.com)
        \ +(?P<key>[A-Za-z0-9+/]+={0,2})
        (?:\ +(?P<comment>[^\x00-\x1f\x7f]*))?""",
    re.X,
)


def authorized_key(line: str) -> str:
    """Return a public key's line as it can stand in an authorized_keys file.

    :raise ValueError: it is none; the message says why, and doesn't quote it."""
    text = line.replace("\t", " ").strip()
    if "PRIVATE KEY" in text:
        raise ValueError("this is a private key: take the line of the file that ends in .pub")
    found = _LINE.fullmatch(text) if len(text) <= MAX_KEY else None
    if found is None:
        raise ValueError("a public key is a line such as 'ssh-ed25519 AAAA… name'")
    try:
        blob = base64.b64decode(found["key"], validate=True)
    except binascii.Error:
        blob = b""
    kind = found["type"].encode()
    if not blob.startswith(len(kind).to_bytes(4, "big") + kind) or not _is_whole(blob):
        raise ValueError(f"the key after {found['type']} is cut off or changed: copy the whole line again")
    return text


def _is_whole(blob: bytes) -> bool:
    """Whether the strings of a key end where it ends, and there are two at least."""
    at, strings = 0, 0
    while at + 4 <= len(blob):
        at += 4 + int.from_bytes(blob[at : at + 4], "big")
        strings += 1
    return at == len(blob) and strings > 1
