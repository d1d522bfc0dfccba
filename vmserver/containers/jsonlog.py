# SPDX-License-Identifier: Apache-2.0
"""A reader of logs in Docker's json-file format, with cursors that stay exact across rotation and restarts.

Each line is a JSON object: ``{"log":"text\\n","stream":"stdout","time":"RFC 3339 with nanoseconds"}``. If
``log`` does not end in a newline, it is a part of a longer line or the last that the container wrote; as in
containerd, both are partial. The newest file is PATH; when it is full it becomes PATH.1, that one PATH.2, and
so on. Sources: moby/moby daemon/logger/copier.go, daemon/logger/jsonfilelog; containerd/containerd
internal/cri/io/logger.go.

A cursor has the file's inode, a checksum of its first line (since inodes are reused), the offset of the next
line, and how many parts of that line have been read.
"""

from __future__ import annotations

import json
import os
import zlib
from calendar import timegm
from pathlib import Path

import attrs

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import vmserver as messages
from vmserver.containers.log_lines import LineReader

MAX_PART_BYTES = 16 * 1024

_FINGERPRINT_BYTES = 128
_STREAMS = {"stdout": messages.LogRecord.STDOUT, "stderr": messages.LogRecord.STDERR}


@attrs.frozen
class Cursor:
    """A place in a log."""

    inode: int
    offset: int  # of the line to read next
    parts: int  # the parts of that line that have been read
    fingerprint: int  # the checksum of the file's first line

    def __str__(self) -> str:
        return f"1.{self.inode}.{self.offset}.{self.parts}.{self.fingerprint}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Parse what `str` gave. :raise InvalidArgument: it is something else."""
        fields = text.split(".")
        if len(fields) != 5 or fields[0] != "1" or not all(f.isascii() and f.isdecimal() for f in fields):
            raise InvalidArgument("cursor: not a cursor of this log; begin with an empty one")
        _, inode, offset, parts, fingerprint = (int(field) for field in fields)
        if max(inode, offset, parts, fingerprint) >= 2**63:
            raise InvalidArgument("cursor: not a cursor of this log; begin with an empty one")
        return cls(inode, offset, parts, fingerprint)


def parse_time(text: str) -> int:
    """Parse an RFC 3339 time into nanoseconds since 1970 UTC; 0 for Go's zero time.

    :raise ValueError: it is something else."""
    seconds = _seconds(text[:19])
    rest = text[19:]
    digits = ""
    if rest.startswith("."):
        digits = rest[1:].rstrip("Zz") if rest[-1:] in "Zz" else rest[1:].partition("+")[0].partition("-")[0]
        rest = rest[1 + len(digits) :]
    if rest not in ("Z", "z"):
        seconds -= _offset(rest)
    nanos = int((digits + "000000000")[:9])
    return max(0, seconds * 10**9 + nanos)


_last_second: tuple[str, int] = ("", 0)


def _seconds(text: str) -> int:
    global _last_second  # cached, since most lines of a burst are of the same second
    known, value = _last_second
    if known != text:
        if len(text) != 19 or text[4] != "-" or text[10] not in "Tt ":
            raise ValueError(text)
        parts = (text[0:4], text[5:7], text[8:10], text[11:13], text[14:16], text[17:19])
        value = timegm((*map(int, parts), 0, 0, 0))
        _last_second = (text, value)
    return value


def _offset(text: str) -> int:
    if len(text) != 6 or text[0] not in "+-" or text[3] != ":":
        raise ValueError(text)
    return (1 if text[0] == "+" else -1) * (int(text[1:3]) * 3600 + int(text[4:6]) * 60)


def format_time(nanos: int) -> str:
    """Format nanoseconds since 1970 as RFC 3339, UTC."""
    import time

    seconds, rest = divmod(nanos, 10**9)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest:09d}Z"


class JsonLog(LineReader):
    """Reads one container's log.

    :param path: the newest file; it need not exist yet.
    :raise InvalidArgument: `cursor` is malformed.
    """

    chunk_bytes = 64 * 1024
    max_line_bytes = 1024 * 1024  # Docker's lines have below 16 KiB of text, six times that when escaped

    def __init__(self, path: Path, cursor: str = "") -> None:
        super().__init__()
        self._path = path
        self._cursor = Cursor.parse(cursor) if cursor else None
        self._inode = 0
        self._fingerprint = 0
        self._skip_parts = 0

    # Files

    def _files(self) -> list[tuple[int, Path]]:
        """Return inode and path of each file of the log, oldest first."""
        found = []
        path = self._path
        number = 0
        while True:
            try:
                found.append((path.stat().st_ino, path))
            except FileNotFoundError:
                if number:  # during a rotation, only the newest may be missing
                    break
            number += 1
            path = self._path.with_name(f"{self._path.name}.{number}")
        return found[::-1]

    def _begin(self) -> bool:
        files = self._files()
        if not files:
            return False
        cursor, self._cursor = self._cursor, None
        if cursor is None:
            return self._open(*files[0])
        for inode, path in files:
            if inode == cursor.inode and self._open(inode, path):
                if self._fits(cursor):
                    self._offset, self._skip_parts = cursor.offset, cursor.parts
                    self._fingerprint = cursor.fingerprint
                    return True
                self.close()
        self._gap = True
        return self._open(*files[0])

    def _open(self, inode: int, path: Path) -> bool:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        if os.fstat(fd).st_ino != inode:  # the file was rotated meanwhile
            os.close(fd)
            return False
        self._use(fd)
        self._inode, self._fingerprint, self._skip_parts = inode, 0, 0
        return True

    def _fits(self, cursor: Cursor) -> bool:
        head = os.pread(self._fd, _FINGERPRINT_BYTES, 0)
        return os.fstat(self._fd).st_size >= cursor.offset and _fingerprint(head) == cursor.fingerprint

    def _advance(self) -> bool:
        try:
            if self._path.stat().st_ino == self._inode:
                return False
        except FileNotFoundError:
            return False
        files = self._files()
        inodes = [inode for inode, _ in files]
        if not files or inodes[-1] == self._inode:
            return False
        if self._grown():
            return True  # it grew between the last read and the rotation
        self._gap = self._gap or bool(self._buffer) or self._inode not in inodes
        following = inodes.index(self._inode) + 1 if self._inode in inodes else 0
        return self._open(*files[following])

    # Lines

    def _records(self, line: bytes, offset: int) -> list[messages.LogRecord]:
        if offset == 0:
            self._fingerprint = _fingerprint(line)
        try:
            entry = json.loads(line)
            text = entry["log"].encode("utf-8", "replace")
            stream = _STREAMS[entry["stream"]]
            nanos = parse_time(entry["time"])
        except (ValueError, KeyError, TypeError, AttributeError):
            self._gap = True
            return []
        whole = text.endswith(b"\n")
        if whole:
            text = text[:-1]
        parts = [text[at : at + MAX_PART_BYTES] for at in range(0, len(text), MAX_PART_BYTES)] or [b""]
        skip, self._skip_parts = self._skip_parts, 0
        records = []
        for number, part in list(enumerate(parts, 1))[skip:]:
            last = number == len(parts)
            cursor = (
                Cursor(self._inode, offset + len(line), 0, self._fingerprint)
                if last
                else Cursor(self._inode, offset, number, self._fingerprint)
            )
            records.append(
                messages.LogRecord(
                    time_nanos=nanos,
                    stream=stream,
                    line=part,
                    partial=not last or not whole,
                    cursor=str(cursor),
                    gap=self._gap,
                )
            )
            self._gap = False
        return records


def _fingerprint(head: bytes) -> int:
    return zlib.crc32(head.partition(b"\n")[0][:_FINGERPRINT_BYTES])
