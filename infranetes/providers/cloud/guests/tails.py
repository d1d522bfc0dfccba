# SPDX-License-Identifier: Apache-2.0
"""A file that a VM's console is written to, and that is read by ranges: only its end, where it has grown."""

from __future__ import annotations

from collections.abc import Callable

import attrs

_AT_ONCE = 4 << 20  # bytes
# Bytes that were read before and are read again: `KeptConsole` recognizes by them what follows.
_OVERLAP = 128 << 10


@attrs.define
class Tail:
    """How far the file was read. :ivar length: in bytes."""

    length: int = 0

    def _thd_read(self, fetch: Callable[[int, int], bytes | None]) -> bytes:
        """Return the file's end, at least what is new.

        :param fetch: returns so many bytes from there on; None: the file ends before that."""
        begin = max(self.length - _OVERLAP, 0)
        content = fetch(begin, _AT_ONCE)
        if content is None:  # the file began anew
            begin, content = 0, fetch(0, _AT_ONCE) or b""
        content = content.rstrip(b"\0")
        self.length = begin + len(content)
        return content
