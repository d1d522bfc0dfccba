"""Looks through a ``docker load`` archive as it comes by and keeps next to nothing of it.

Sources: POSIX pax (IEEE 1003.1) for the tar, moby/moby image/spec/v1.2.md for what is in it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any

from infranetes_common.errors import InvalidArgument

MAX_JSON_BYTES = 4 * 1024 * 1024
MAX_DOCUMENTS = 4
_BLOCK = 512
_NAME = re.compile(r"[A-Za-z0-9._/:-]{1,255}")


class TarWalker:
    """Bytes in; the content of the members that are of interest out, in `kept`."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._skip = 0  # of the present member's content and padding
        self._keep = 0  # of its content, still to be kept
        self._name = ""
        self._done = False
        self.kept: dict[str, bytearray] = {}

    def feed(self, data: bytes) -> None:
        """:raise InvalidArgument: this is no tar, or what should be small is not."""
        self._buffer += data
        while not self._done:
            if self._skip:
                piece = self._buffer[: self._skip]
                if self._keep:
                    self.kept[self._name] += piece[: self._keep]
                    self._keep -= min(self._keep, len(piece))
                self._skip -= len(piece)
                del self._buffer[: len(piece)]
                if self._skip:
                    return
            if len(self._buffer) < _BLOCK:
                return
            header = bytes(self._buffer[:_BLOCK])
            del self._buffer[:_BLOCK]
            self._member(header)
        self._buffer.clear()

    def end(self) -> None:
        """:raise InvalidArgument: the archive is cut off."""
        if self._skip or not self.kept:
            raise InvalidArgument("the archive is cut off, or no archive")

    def _member(self, header: bytes) -> None:
        if not any(header):
            self._done = True
            return
        try:
            size = int(header[124:136].strip(b"\0 ") or b"0", 8)
            checksum = int(header[148:156].strip(b"\0 "), 8)
        except ValueError:
            raise InvalidArgument("the archive is not a tar") from None
        if checksum != sum(header[:148]) + 8 * 0x20 + sum(header[156:]) or size < 0:
            raise InvalidArgument("the archive is not a tar")
        self._name = header[:100].rstrip(b"\0").decode(errors="replace")
        self._skip = size + -size % _BLOCK
        if self._name.endswith(".json") and header[156:157] in (b"0", b"\0"):
            if size > MAX_JSON_BYTES or len(self.kept) >= MAX_DOCUMENTS:
                raise InvalidArgument(f"the archive's {self._name} is too large, or one too many")
            self._keep = size
            self.kept[self._name] = bytearray()


async def check(image_id: str, archive: AsyncIterator[bytes]) -> None:
    """Read all of `archive`.

    :raise InvalidArgument: it is no archive, or not that of the image.
    """
    walker = TarWalker()
    async for data in archive:
        walker.feed(data)
    walker.end()
    try:
        manifest: Any = json.loads(bytes(walker.kept["manifest.json"]))
        names = [str(image["Config"]) for image in manifest]
    except (KeyError, ValueError, TypeError):
        raise InvalidArgument("the archive has no manifest.json as docker save writes it") from None
    if len(names) != 1 or not _NAME.fullmatch(names[0]):
        raise InvalidArgument("the archive has not exactly one image")
    config = walker.kept.get(names[0], bytearray())
    if "sha256:" + hashlib.sha256(config).hexdigest() != image_id:
        raise InvalidArgument(f"the archive is not that of image {image_id}")
