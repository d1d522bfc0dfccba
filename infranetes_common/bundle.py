"""Images on a disk that a template is booted with: written by the node, read by the agent.

For each image a block that names it and its size, then its `docker load` archive; a block of zeros ends it.
The disk has more than the bundle where its size has to be that of whole sectors.
"""

from __future__ import annotations

import re

import attrs

from infranetes_common.errors import InvalidArgument

BLOCK = 512  # bytes: a disk's sector, and a tar's block
SERIAL = "infranetes-images"  # how the guest knows the disk: virtio's serial, at most 20 bytes

_HEADER = re.compile(rb"infranetes-image (sha256:[0-9a-f]{64}) (\d{1,15})\n\0+")


@attrs.frozen
class Section:
    """One image: its id and the bytes of its archive, a multiple of `BLOCK`."""

    image_id: str
    size: int


def header(section: Section) -> bytes:
    """The block before an archive."""
    return f"infranetes-image {section.image_id} {section.size}\n".encode().ljust(BLOCK, b"\0")


def parse(block: bytes) -> Section | None:
    """What a block announces; None: the end.

    :raise InvalidArgument: it is no such block.
    """
    if not block.strip(b"\0"):
        return None
    found = _HEADER.fullmatch(block)
    if found is None or len(block) != BLOCK or int(found[2]) % BLOCK:
        raise InvalidArgument("the disk of images is not one that a node wrote")
    return Section(found[1].decode(), int(found[2]))
