# SPDX-License-Identifier: Apache-2.0
"""A container's log: the format that conmon writes, and the files that are kept.

Each line is in the CRI's format: a time (RFC 3339), the stream, F or P, and text. P is a part of a longer
line, or the last that the container wrote, if it did not end in a newline. Lines that conmon has read
together have the same time.

The newest file is PATH. When it is full it is renamed to PATH.1, the next one to PATH.2, and so on; the
oldest is deleted. So the number of a file never changes, and that of PATH is the next one. A cursor has a
file's number and the offset of the next line. Sources: containers/conmon src/ctr_logging.c; kubernetes
pkg/kubelet/kuberuntime/logs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import attrs

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import vmserver as messages
from vmserver.containers.jsonlog import parse_time
from vmserver.containers.log_lines import TEXT_BYTES, LineReader

_STREAMS = {b"stdout": messages.LogRecord.STDOUT, b"stderr": messages.LogRecord.STDERR}
_MAX_NUMBER_DIGITS = 18


@attrs.frozen
class Cursor:
    """A place in a log.

    :ivar number: of the file. :ivar offset: of the next line.
    """

    number: int
    offset: int

    def __str__(self) -> str:
        return f"1.{self.number}.{self.offset}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Parse what `str` gave. :raise InvalidArgument: it is something else."""
        fields = text.split(".")
        right = all(f.isascii() and f.isdecimal() and len(f) <= _MAX_NUMBER_DIGITS for f in fields)
        if len(fields) != 3 or fields[0] != "1" or not right:
            raise InvalidArgument("cursor: not a cursor of this log; begin with an empty one")
        return cls(int(fields[1]), int(fields[2]))


def numbers(path: Path) -> list[int]:
    """Return the numbers of a log's renamed files, oldest first; none once its container is removed."""
    prefix = f"{path.name}."
    found = []
    try:
        names = os.listdir(path.parent)
    except FileNotFoundError:
        return []
    for name in names:
        number = name.removeprefix(prefix)
        if name.startswith(prefix) and number.isdecimal() and len(number) <= _MAX_NUMBER_DIGITS:
            found.append(int(number))
    return sorted(found)


def renamed(path: Path, number: int) -> Path:
    """Return the name that a log's file has once it is full."""
    return path.with_name(f"{path.name}.{number}")


def thd_clear(path: Path) -> None:
    """Delete a log's lines. What is being written to it goes on to be: conmon appends.

    :raise OSError: one of its files can't be changed."""
    for number in numbers(path):
        renamed(path, number).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.truncate(path, 0)


class CriLog(LineReader):
    """Reads one container's log.

    :param path: the newest file; it need not exist yet.
    :raise InvalidArgument: `cursor` is malformed.
    """

    chunk_bytes = 48 * 1024
    max_line_bytes = 64 * 1024  # conmon's lines are below 9 KiB

    def __init__(self, path: Path, cursor: str = "") -> None:
        super().__init__()
        self._path = path
        self._cursor = Cursor.parse(cursor) if cursor else None
        self._number = 0
        self._time: tuple[bytes, int] = (b"", 0)  # the text of the last line's time, and its value

    @property
    def position(self) -> Cursor | None:
        """How far it is read; None: nothing is."""
        return Cursor(self._number, self._offset) if self._number else None

    # Files

    def _begin(self) -> bool:
        cursor = self._cursor
        if cursor is not None and self._open(cursor.number):
            if self._fits(cursor.offset):
                self._cursor = None
                self._offset = cursor.offset
                return True
            self.close()
        if not self._open_after(0):
            return False
        self._gap = cursor is not None
        self._cursor = None
        return True

    def _fits(self, offset: int) -> bool:
        """Return whether a line may begin at this offset."""
        return offset == 0 or os.pread(self._fd, 1, offset - 1) == b"\n"

    def _open(self, number: int) -> bool:
        """Open the file of this number, if it exists."""
        while True:
            known = numbers(self._path)
            newest = (known[-1] if known else 0) + 1
            if number not in known and number != newest:
                return False
            try:
                fd = os.open(
                    self._path if number == newest else renamed(self._path, number),
                    os.O_RDONLY | os.O_CLOEXEC,
                )
            except FileNotFoundError:
                if numbers(self._path) == known:
                    return False
                continue
            if number == newest and numbers(self._path)[-1:] != known[-1:]:
                os.close(fd)  # rotated meanwhile: this may be the file after it
                continue
            self._use(fd)
            self._number = number
            return True

    def _open_after(self, number: int) -> bool:
        """Open the oldest file that has a higher number. One in between that is gone is a gap."""
        while True:
            known = numbers(self._path)
            following = [each for each in known if each > number] or [(known[-1] if known else 0) + 1]
            if self._open(following[0]):
                self._gap = self._gap or following[0] != number + 1
                return True
            if numbers(self._path) == known:
                return False

    def _advance(self) -> bool:
        try:
            newest = self._path.stat()
        except FileNotFoundError:  # renamed: conmon still writes to it, or has ended
            if numbers(self._path)[-1:] <= [self._number]:
                return False
        else:
            if os.path.samestat(newest, os.fstat(self._fd)):
                return False
        # conmon closes the old file before it creates the new one, so the old one is complete now.
        if self._grown():
            return True
        torn = bool(self._buffer)
        if not self._open_after(self._number):
            return False
        self._gap = self._gap or torn
        return True

    # Lines

    def _text(self, data: bytes) -> tuple[list[messages.LogRecord], int]:
        # The lines as they are: the node looks at each of them anyway.
        end = data.rfind(b"\n") + 1
        if end > TEXT_BYTES:
            end = data.rfind(b"\n", 0, TEXT_BYTES) + 1
        if not end:
            return ([], 0) if len(data) <= TEXT_BYTES else self._each(data)
        gap, self._gap = self._gap, False
        cursor = f"1.{self._number}.{self._offset + end}"
        return [messages.LogRecord(text=data[:end], cursor=cursor, gap=gap)], end

    def _records(self, line: bytes, offset: int) -> Iterator[messages.LogRecord]:
        time, _, rest = line[:-1].partition(b" ")
        stream, _, rest = rest.partition(b" ")
        tag, space, text = rest.partition(b" ")
        if stream not in _STREAMS or tag not in (b"F", b"P") or not space:
            self._gap = True
            return
        if time != self._time[0]:
            try:
                self._time = (time, parse_time(time.decode("ascii")))
            except ValueError:
                self._gap = True
                return
        gap, self._gap = self._gap, False
        yield messages.LogRecord(
            time_nanos=self._time[1],
            stream=_STREAMS[stream],
            line=text,
            partial=tag == b"P",
            cursor=f"1.{self._number}.{offset + len(line)}",
            gap=gap,
        )
