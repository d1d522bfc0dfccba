# SPDX-License-Identifier: Apache-2.0
"""The CRI's log format, as kubelet reads it (kubernetes, pkg/kubelet/kuberuntime/logs)."""

from __future__ import annotations

import re
import time
from functools import lru_cache

from infranetes_common.wire import vmserver

SHORTEST = len(b"2026-11-28T07:40:00.000000000Z stdout F \n")
MOST_DAMAGED = 200  # lines too short to be in the format, of those that are looked at together
MAX_LINE = 16 * 1024  # bytes of content per line, as in containerd
MAX_RECORD = 64 * 1024  # bytes of a record's line that are rendered; as newlines alone they are 2.6 MiB
STREAMS = {vmserver.LogRecord.STDOUT: b"stdout", vmserver.LogRecord.STDERR: b"stderr"}
GAP = "lines are missing here: they were deleted in the VM before the node had read them"

_LINE = re.compile(
    rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9})(?:Z|\+00:00|([+-]\d\d:\d\d))"
    rb"( std(?:out|err) [FP] .{0,%d})" % MAX_LINE
)


def render(record: vmserver.LogRecord) -> bytes:
    """Return a record as `<RFC3339Nano> <stream> <P|F> <content>` and a newline; each time the same bytes.

    Content over 16 KiB becomes several lines, all but the last of them with P. A newline within a record ends
    a line and so can't break the format. Where records are missing before this one, a line says so.
    """
    lines = lines_of(record)
    time = lines.partition(b" ")[0] or timestamp(record.time_nanos)
    return notice(time, GAP) + lines if record.gap else lines


def lines_of(record: vmserver.LogRecord) -> bytes:
    """Return what `render` does, without a line about what is missing.

    No reader makes a record of over MAX_RECORD bytes: what is beyond is left out."""
    if record.HasField("text"):
        return record.text
    head = b"%s %s " % (timestamp(record.time_nanos), STREAMS.get(record.stream, b"stdout"))
    whole, newline, last = record.line[:MAX_RECORD].rpartition(b"\n")
    return (_lines(head, whole) if newline else b"") + _line(head, last, record.partial)


def notice(time: bytes, text: str) -> bytes:
    """Return a line of our own for a container's log."""
    return b"%s stderr F infranetes: %s\n" % (time, text.encode())


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


def checked(text: bytes) -> tuple[bytes, bool]:
    """Return the lines of `text` that are in the format, with Z for UTC, and whether all of them are."""
    if text.count(b"\n") > MOST_DAMAGED + len(text) // SHORTEST:  # meant to keep the node busy
        return b"", False
    *lines, rest = text.split(b"\n")
    found = [
        match[1] + (match[2] or b"Z") + match[3] + b"\n" for match in map(_LINE.fullmatch, lines) if match
    ]
    return b"".join(found), not rest and len(found) == len(lines)


def last_parts(text: bytes) -> dict[vmserver.LogRecord.Stream, tuple[bytes, bool]]:
    """Return the time of each stream's last line in `text`, and whether that line goes on."""
    found = {}
    for stream, name in STREAMS.items():
        end = len(text)
        while (at := text.rfind(b" " + name + b" ", 0, end)) >= 0:
            end = text.rfind(b"\n", 0, at) + 1  # what was found may be a part of the line's content
            time, written, tag = text[end : end + 64].split(b" ", 3)[:3]
            if written == name:
                found[stream] = (time, tag == b"P")
                break
    return found
