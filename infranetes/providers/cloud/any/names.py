# SPDX-License-Identifier: Apache-2.0
"""Names of VMs, which say whose they are: every driver tells a node's name, and few tell tags.

A name is a valid host name and label everywhere: 62 letters, digits and one hyphen::

    i OOOOOOOOO N - BBBB…

O is of the cluster and the node, N of the number of the token's VM, B of its token and its sandbox.
"""

from __future__ import annotations

import hashlib
import re
import string

_DIGITS = string.digits + string.ascii_lowercase
_OWNER, _BOTH = 9, 50  # characters, for 46 and 256 bits
_ID = re.compile(r"[0-9a-f]{32}")


def owner_of(cluster: str, node: str) -> str:
    """Return what names of this node's VMs begin with."""
    digest = hashlib.sha256(f"{cluster}\0{node}".encode()).digest()
    return "i" + _text(int.from_bytes(digest), _OWNER)


def name_of(owner: str, token: str, sandbox_id: str, number: int) -> str:
    """Return a VM's name. :raise ValueError: that is no token, or no sandbox's id."""
    if not (_ID.fullmatch(token) and _ID.fullmatch(sandbox_id)):
        raise ValueError("32 hex digits are expected of a token, and of a sandbox's id")
    return f"{owner}{_text(number, 1)}-{_text(int(token + sandbox_id, 16), _BOTH)}"


def parse(name: object, owner: str) -> tuple[str, str] | None:
    """Return the token and the sandbox of a VM; None: it is not this node's."""
    found = re.fullmatch(rf"{owner}[0-9a-z]-([0-9a-z]{{{_BOTH}}})", name) if isinstance(name, str) else None
    both = int(found[1], 36) if found else 1 << 256
    text = f"{both:064x}"
    return (text[:32], text[32:]) if both < 1 << 256 else None


def _text(number: int, length: int) -> str:
    digits = ""
    for _ in range(length):
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return digits
