# SPDX-License-Identifier: Apache-2.0
"""The CRI's log format, as kubelet reads it (kubernetes, pkg/kubelet/kuberuntime/logs)."""

from __future__ import annotations

import time
from functools import lru_cache

from infranetes_common.wire import vmserver

MAX_LINE = 16 * 1024  # bytes of content per line, as in containerd
_STREAMS = {0: b"stdout", 1: b"stderr"}


def render(record: vmserver.LogRecord) -> bytes:
    """Return a record as `<RFC3339Nano> <stream> <P|F> <content>` and a newline; each time the same bytes.

    Content over 16 KiB becomes several lines, all but the last of them with P. A newline within a record ends
    a line and so can't break the format.
    """
    head = b"%s %s " % (timestamp(record.time_nanos), _STREAMS.get(record.stream, b"stdout"))
    whole, newline, last = record.line.rpartition(b"\n")
    return (_lines(head, whole) if newline else b"") + _line(head, last, record.partial)


def _lines(head: bytes, whole: bytes) -> bytes:
    """Render lines that all end. There may be very many empty ones, so a loop is avoided where possible."""
    if len(whole) <= MAX_LINE:
        return head + b"F " + whole.replace(b"\n", b"\n" + head + b"F ") + b"\n"
    return b"".join(_line(head, line, False) for line in whole.split(b"\n"))


def _line(head: bytes, line: bytes, more: bool) -> bytes:
    *parts, last = [line[i : i + MAX_LINE] for i in range(0, len(line), MAX_LINE)] or [b""]
    out = [b"%sP %s\n" % (head, part) for part in parts]
    out.append(b"%s%s %s\n" % (head, b"P" if more else b"F", last))
    return b"".join(out)


def timestamp(nanos: int) -> bytes:
    """Format nanoseconds since 1970 UTC with nine digits: 2026-02-03T04:05:06.000000007Z."""
    seconds, rest = divmod(nanos, 1_000_000_000)
    return b"%s.%09dZ" % (_second(seconds), rest)


@lru_cache(maxsize=64)
def _second(seconds: int) -> bytes:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)).encode()
