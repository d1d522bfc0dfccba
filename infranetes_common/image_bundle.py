# SPDX-License-Identifier: Apache-2.0
"""The format of the disk of images that a template is booted with: written by the node, read by the agent.

For each image there is a block with its id and size, then its archive as for `docker load`; a block of zeros
ends the bundle. The disk may be longer, since its size is one of whole sectors.
"""

from __future__ import annotations

import re

import attrs

from infranetes_common.errors import InvalidArgument

BLOCK = 512  # bytes; a disk's sector, and a tar archive's block
SERIAL = "infranetes-images"  # identifies the disk in the guest; virtio allows 20 bytes

_HEADER = re.compile(rb"infranetes-image (sha256:[0-9a-f]{64}) (\d{1,15})\n\0+")


@attrs.frozen
class Section:
    """One image.

    :ivar size: of its archive in bytes, a multiple of `BLOCK`.
    """

    image_id: str
    size: int


def header(section: Section) -> bytes:
    """Return the block that goes before an archive."""
    return f"infranetes-image {section.image_id} {section.size}\n".encode().ljust(BLOCK, b"\0")


def parse(block: bytes) -> Section | None:
    """Return the section that a block announces; None at the end.

    :raise InvalidArgument: the block was not written by `header`.
    """
    if not block.strip(b"\0"):
        return None
    found = _HEADER.fullmatch(block)
    if found is None or len(block) != BLOCK or int(found[2]) % BLOCK:
        raise InvalidArgument("the disk of images is not one that a node wrote")
    return Section(found[1].decode(), int(found[2]))
