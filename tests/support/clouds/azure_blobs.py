# SPDX-License-Identifier: Apache-2.0
"""Azure's storage, as far as boot diagnostics has it: a page blob for each VM's serial port.

Sources: Azure Storage, "Get Blob", "Specifying the range header for Blob service operations" (no ranges that
count from the end), "Status and error codes"; that such a blob ends in zeros, and is made late, is what
people report of it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Any

from tests.support.clouds.http_sites import Answer

_PAGE = 512


class SerialBlobs:
    """The blobs of one cloud.

    :param console: returns what a VM has written. :ivar made: whether blobs are there yet.
    :ivar links: how many were signed. :ivar ranges: those that were read."""

    def __init__(self, console: Callable[[str], str]) -> None:
        self._console = console
        self._valid: set[str] = set()
        self.made = True
        self.links = 0
        self.ranges: list[tuple[int, int]] = []

    def link(self, endpoint: str, name: str) -> str:
        """Return a link to a VM's blob."""
        self.links += 1
        signature = f"{secrets.token_urlsafe(8)}+/="
        self._valid.add(signature)
        return f"{endpoint}/console/{name}?sp=r&sig={signature.replace('+/=', '%2B%2F%3D')}"

    def expire(self) -> None:
        """Have all links be signed for too short a time."""
        self._valid.clear()

    def answer(self, request: Any, name: str, query: dict[str, str]) -> Answer:
        """Serve a request for a blob."""
        if query.get("sig") not in self._valid or request.getHeader("Authorization"):
            return _refused(403, "AuthenticationFailed")
        if not self.made:
            return _refused(404, "BlobNotFound")
        text = self._console(name).encode()
        content = text + bytes(_PAGE + -len(text) % _PAGE)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", request.getHeader("Range") or "")
        if asked is None:
            return 200, content, ("x-ms-blob-type", "PageBlob")
        begin, end = int(asked[1]), int(asked[2])
        self.ranges.append((begin, end))
        if begin >= len(content):
            return _refused(416, "InvalidRange")
        part = content[begin : end + 1]
        return 206, part, ("Content-Range", f"bytes {begin}-{begin + len(part) - 1}/{len(content)}")


def _refused(status: int, code: str) -> Answer:
    return status, f"<Error><Code>{code}</Code></Error>".encode(), ("x-ms-error-code", code)
