# SPDX-License-Identifier: Apache-2.0
"""The limits of a layer, and the errors for one that exceeds them or is malformed."""

from __future__ import annotations

import attrs

MIB = 1 << 20


class BadLayer(Exception):
    """The layer can't be used. The message says why, for people, without naming the layer."""


class Incomplete(BadLayer):
    """The layer lacks what the layers below may have: the file of a hard link, or a file's directory."""


@attrs.frozen
class Limits:
    """The limits of one layer. The defaults are far above what real images need.

    :ivar max_bytes: of the uncompressed tar, and of all files' sizes together (`images.max_layer_bytes`).
    :ivar hole_bytes: of the holes of all sparse files together.
    :ivar entries: of the tar, and of files and directories in the tree.
    :ivar depth: of directories below the root.
    :ivar path_bytes: of an entry's name or of a link's target.
    :ivar header_bytes: of one PAX header.
    :ivar xattr_bytes: of one file's extended attributes, names included.
    :ivar held_bytes: of what is held until the end: names, links' targets, extended attributes.
    :ivar memory_bytes: of the child's address space.
    :ivar seconds: that the work may take.
    """

    max_bytes: int = 64 << 30
    hole_bytes: int = 16 << 30
    entries: int = 1_000_000
    depth: int = 512
    path_bytes: int = 4095
    header_bytes: int = MIB
    xattr_bytes: int = 60 * 1024
    held_bytes: int = 512 * MIB
    memory_bytes: int = 2048 * MIB
    seconds: float = 1800.0


def quoted(name: bytes) -> str:
    """Return a name from a layer as errors show it: printable and short."""
    text = name.decode("utf-8", "backslashreplace")
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return f"'{text}'" if len(text) <= 200 else f"'{text[:150]}...{text[-40:]}'"


#: How the child ends: the layer is bad, the disk is full, something else failed, or `Incomplete`.
BAD, FULL, FAILED, INCOMPLETE = 65, 66, 67, 68

SAID_BYTES = 2000
"""How much of what a child says is read."""
