"""Log lines as kubelet reads them (source: kubelet, pkg/kubelet/kuberuntime/logs: the CRI log format)."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

MAX_LINE = 16 * 1024  # bytes of content per line, as containerd has it
_STREAMS = {0: b"stdout", 1: b"stderr"}


def render(record: Any) -> bytes:
    """`<RFC3339Nano> <stream> <P|F> <content>` and a newline, for one LogRecord; the same bytes each time.

    What is over 16 KiB comes in several lines, all but the last with P. A newline within a record
    can't break the format: it ends a line.
    """
    head = b"%s %s " % (timestamp(record.time_nanos), _STREAMS.get(record.stream, b"stdout"))
    out = []
    *whole, last = record.line.split(b"\n")
    for line, more in [*((line, False) for line in whole), (last, record.partial)]:
        cut = [line[i : i + MAX_LINE] for i in range(0, len(line), MAX_LINE)] or [b""]
        out += [b"%sP %s\n" % (head, part) for part in cut[:-1]]
        out.append(b"%s%s %s\n" % (head, b"P" if more else b"F", cut[-1]))
    return b"".join(out)


def timestamp(nanos: int) -> bytes:
    """Nanoseconds since 1970 as UTC with nine digits: 2026-02-03T04:05:06.000000007Z."""
    seconds, rest = divmod(nanos, 1_000_000_000)
    return b"%s.%09dZ" % (_second(seconds), rest)


@lru_cache(maxsize=64)
def _second(seconds: int) -> bytes:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)).encode()
