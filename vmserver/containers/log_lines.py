# SPDX-License-Identifier: Apache-2.0
"""Reading a container's log, line by line, from files that are renamed when they are full."""

from __future__ import annotations

import abc
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Protocol

from infranetes_common.concurrency import backoff, run_in_thread, sleep, start
from infranetes_common.cri_log import lines_of
from infranetes_common.reactors import IReactor
from infranetes_common.wire import vmserver as messages

TEXT_BYTES = 60 * 1024  # the most of one record's `text`
POLL_SECONDS = (0.03, 0.25)  # the first pause after data was read, and the longest


class LogReader(Protocol):
    """Reads one container's log, whatever its format."""

    def read(self) -> list[messages.LogRecord]:
        """Return the next records; none at the log's present end."""

    def read_text(self) -> list[messages.LogRecord]:
        """Do the same, with many lines as one record."""

    def close(self) -> None:
        """Close the file. Idempotent."""

    def close_in_threads(self, reactor: IReactor) -> None:
        """From now on have a file that was deleted meanwhile closed in a thread: that frees its blocks."""


class LineReader(abc.ABC):
    """A `LogReader` of files of lines. A subclass knows the files, and parses a line.

    :cvar chunk_bytes: bytes to read at a time. :cvar max_line_bytes: longer lines are skipped: no honest
        writer produces them.
    """

    chunk_bytes: int
    max_line_bytes: int

    def __init__(self) -> None:
        self._reactor: IReactor | None = None
        self._fd = -1
        self._offset = 0  # of the first byte in the buffer
        self._buffer = b""  # data read that is not a whole line yet
        self._gap = False  # whether lines are missing before the next record

    @abc.abstractmethod
    def _begin(self) -> bool:
        """Open the first file to read; return whether there is one."""

    @abc.abstractmethod
    def _advance(self) -> bool:
        """Go on to the next newer file, if this one was read to its end and there is one."""

    @abc.abstractmethod
    def _records(self, line: bytes, offset: int) -> Iterable[messages.LogRecord]:
        """Return the records in a line, which ends with a newline and begins at `offset`."""

    def _use(self, descriptor: int) -> None:
        """Read another file, from its beginning."""
        self.close()
        self._fd, self._offset, self._buffer = descriptor, 0, b""

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if self._reactor is None or os.fstat(fd).st_nlink:
            os.close(fd)
        else:
            start(run_in_thread(self._reactor, os.close, fd))

    def close_in_threads(self, reactor: IReactor) -> None:
        """See `LogReader.close_in_threads`."""
        self._reactor = reactor

    def read(self) -> list[messages.LogRecord]:
        """Return the records of the next chunk; none at the log's present end."""
        return self._read(self._each)

    def read_text(self) -> list[messages.LogRecord]:
        """Do the same, with many lines as one record."""
        return self._read(self._text)

    def _text(self, data: bytes) -> tuple[list[messages.LogRecord], int]:
        """Return the records of the lines in `data`, many in each, and where the last line ends."""
        records, end = self._each(data)
        return packed(records), end

    def _read(
        self, parse: Callable[[bytes], tuple[list[messages.LogRecord], int]]
    ) -> list[messages.LogRecord]:
        while True:
            if self._fd < 0 and not self._begin():
                return []
            chunk = os.pread(self._fd, self.chunk_bytes, self._offset + len(self._buffer))
            if chunk:
                if records := self._feed(chunk, parse):
                    return records
            elif not self._advance():
                return []

    def _each(self, data: bytes) -> tuple[list[messages.LogRecord], int]:
        """Return the records of the lines in `data`, and where the last line ends."""
        records: list[messages.LogRecord] = []
        start = 0
        while (end := data.find(b"\n", start) + 1) > 0:
            records.extend(self._records(data[start:end], self._offset + start))
            start = end
        return records, start

    def _feed(
        self, chunk: bytes, parse: Callable[[bytes], tuple[list[messages.LogRecord], int]]
    ) -> list[messages.LogRecord]:
        data = self._buffer + chunk
        records, start = parse(data)
        self._offset += start
        self._buffer = data[start:]
        if len(self._buffer) > self.max_line_bytes:
            self._offset += len(self._buffer)
            self._buffer = b""
            self._gap = True
        return records

    def _grown(self) -> bool:
        """Return whether the file has grown since it was read."""
        return os.fstat(self._fd).st_size > self._offset + len(self._buffer)


def packed(records: Sequence[messages.LogRecord]) -> list[messages.LogRecord]:
    """Return the same lines as few records with `text`."""
    found: list[messages.LogRecord] = []
    parts: list[bytes] = []
    size = 0
    for record in records:
        part = lines_of(record)
        if not found or record.gap or size + len(part) > TEXT_BYTES:
            if found:
                found[-1].text = b"".join(parts)
            found.append(messages.LogRecord(gap=record.gap))
            parts, size = [], 0
        parts.append(part)
        size += len(part)
        found[-1].cursor = record.cursor
    if found:
        found[-1].text = b"".join(parts)
    return found


async def records(
    reactor: IReactor, log: LogReader, follow: bool, ended: Callable[[], bool], text: bool = False
) -> AsyncGenerator[messages.LogRecord, None]:
    """Iterate over `log`, and with `follow` continue as it grows, until `ended()` and everything is read.

    :param text: whether many lines come as one record.
    """
    log.close_in_threads(reactor)
    read = log.read_text if text else log.read
    pauses = backoff(*POLL_SECONDS, factor=1.5)
    try:
        while True:
            over = not follow or ended()
            batch = read()
            for record in batch:
                yield record
            if batch:
                pauses = backoff(*POLL_SECONDS, factor=1.5)
                await sleep(reactor, 0)
            elif over:
                return
            else:
                await sleep(reactor, next(pauses))
    finally:
        log.close()
