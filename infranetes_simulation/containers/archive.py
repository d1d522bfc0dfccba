# SPDX-License-Identifier: Apache-2.0
"""Check a ``docker load`` archive as it streams by, and store next to nothing of it.

Sources: POSIX pax (IEEE 1003.1) for the tar, moby/moby image/spec/v1.2.md for what is in it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import AsyncIterator

from infranetes_common.errors import InvalidArgument

MAX_JSON_BYTES = 4 * 1024 * 1024
MAX_DOCUMENTS = 4
_BLOCK = 512
_NAME = re.compile(r"[A-Za-z0-9._/:-]{1,255}")


class TarWalker:
    """Finds the JSON documents in a tar that is fed to it.

    :ivar documents: their content, by member name.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._skip = 0  # bytes left of the current member's content and padding
        self._collect = 0  # bytes left of its content to collect
        self._name = ""
        self._done = False
        self.documents: dict[str, bytearray] = {}

    def feed(self, data: bytes) -> None:
        """Take some bytes in. :raise InvalidArgument: this is not a tar, or a document is too large."""
        self._buffer += data
        while not self._done:
            if self._skip:
                chunk = self._buffer[: self._skip]
                if self._collect:
                    self.documents[self._name] += chunk[: self._collect]
                    self._collect -= min(self._collect, len(chunk))
                self._skip -= len(chunk)
                del self._buffer[: len(chunk)]
                if self._skip:
                    return
            if len(self._buffer) < _BLOCK:
                return
            header = bytes(self._buffer[:_BLOCK])
            del self._buffer[:_BLOCK]
            self._member(header)
        self._buffer.clear()

    def end(self) -> None:
        """Check that it was whole. :raise InvalidArgument: the archive is cut off."""
        if self._skip or not self.documents:
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
            if size > MAX_JSON_BYTES or len(self.documents) >= MAX_DOCUMENTS:
                raise InvalidArgument(f"the archive's {self._name} is too large, or one too many")
            self._collect = size
            self.documents[self._name] = bytearray()


async def check(image_id: str, archive: AsyncIterator[bytes]) -> None:
    """Read all of `archive`.

    :raise InvalidArgument: it is not an archive, or is that of another image.
    """
    walker = TarWalker()
    async for data in archive:
        walker.feed(data)
    walker.end()
    try:
        manifest = json.loads(bytes(walker.documents["manifest.json"]))
        names = [str(image["Config"]) for image in manifest]
    except (KeyError, ValueError, TypeError):
        raise InvalidArgument("the archive has no manifest.json as docker save writes it") from None
    if len(names) != 1 or not _NAME.fullmatch(names[0]):
        raise InvalidArgument("the archive has not exactly one image")
    config = walker.documents.get(names[0], bytearray())
    if "sha256:" + hashlib.sha256(config).hexdigest() != image_id:
        raise InvalidArgument(f"the archive is not that of image {image_id}")
