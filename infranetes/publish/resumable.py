# SPDX-License-Identifier: Apache-2.0
"""Cloud Storage's resumable uploads, without I/O: what to send next, and what an answer means.

Source: Cloud Storage, "Perform resumable uploads". A session takes an object from its beginning on, and says
how much of it is kept, which may be less than was sent.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping

import attrs

CHUNK = 16 << 20  # a multiple of 256 KiB, as all but the last one have to be
_RANGE = re.compile(r"bytes=0-([0-9]{1,18})")


class Outcome(enum.Enum):
    """The meaning of an answer for the session."""

    GO_ON = "go on"
    DONE = "done"
    GONE = "gone"  # the session has ended, or never was: begin a new one
    AGAIN = "again"  # it is not known what was kept: ask, after a pause
    REFUSED = "refused"


@attrs.define
class ResumableUpload:
    """The state of one upload.

    :param size: of the object. :ivar kept: how many bytes of it the cloud has for sure.
    """

    size: int
    kept: int = 0

    def question(self) -> dict[str, str]:
        """Headers of an empty request that asks how much is kept."""
        return {"Content-Range": f"bytes */{self.size}", "Content-Length": "0"}

    def next_range(self) -> tuple[int, int]:
        """Return the offset and the length of the next part."""
        return self.kept, min(CHUNK, self.size - self.kept)

    def headers(self) -> dict[str, str]:
        """Headers of the next part."""
        begin, length = self.next_range()
        return {"Content-Range": f"bytes {begin}-{begin + length - 1}/{self.size}"}

    def answered(self, status: int, headers: Mapping[str, str]) -> Outcome:
        """Take an answer to a question or a part."""
        if status in (200, 201):
            self.kept = self.size
            return Outcome.DONE
        if status == 308:
            found = _RANGE.fullmatch(headers.get("Range", ""))
            self.kept = min(int(found[1]) + 1, self.size) if found else 0
            return Outcome.GO_ON
        if status in (404, 410):
            return Outcome.GONE
        return Outcome.AGAIN if status >= 500 or status in (408, 429) else Outcome.REFUSED
