# SPDX-License-Identifier: Apache-2.0
"""Reading a container's log, line by line, from files that are renamed when they are full."""

from __future__ import annotations

import abc
import os
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Protocol

from twisted.internet.interfaces import IReactorTime

from infranetes_common.concurrency import backoff, sleep
from infranetes_common.wire import vmserver as messages

POLL_SECONDS = (0.03, 0.25)  # the first pause after data was read, and the longest


class LogReader(Protocol):
    """Reads one container's log, whatever its format."""

    def read(self) -> list[messages.LogRecord]:
        """Return the next records; none at the log's present end."""

    def close(self) -> None:
        """Close the file. Idempotent."""


class LineReader(abc.ABC):
    """A `LogReader` of files of lines. A subclass knows the files, and parses a line.

    :cvar chunk_bytes: bytes to read at a time. :cvar max_line_bytes: longer lines are skipped: no honest
        writer produces them.
    """

    chunk_bytes: int
    max_line_bytes: int

    def __init__(self) -> None:
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
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self) -> list[messages.LogRecord]:
        """Return the records of the next chunk; none at the log's present end."""
        while True:
            if self._fd < 0 and not self._begin():
                return []
            chunk = os.pread(self._fd, self.chunk_bytes, self._offset + len(self._buffer))
            if chunk:
                if records := self._feed(chunk):
                    return records
            elif not self._advance():
                return []

    def _feed(self, chunk: bytes) -> list[messages.LogRecord]:
        data = self._buffer + chunk
        records: list[messages.LogRecord] = []
        start = 0
        while (end := data.find(b"\n", start) + 1) > 0:
            records.extend(self._records(data[start:end], self._offset + start))
            start = end
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


async def records(
    reactor: IReactorTime, log: LogReader, follow: bool, ended: Callable[[], bool]
) -> AsyncGenerator[messages.LogRecord, None]:
    """Iterate over `log`, and with `follow` continue as it grows, until `ended()` and everything is read."""
    pauses = backoff(*POLL_SECONDS, factor=1.5)
    try:
        while True:
            over = not follow or ended()
            batch = log.read()
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
