# SPDX-License-Identifier: Apache-2.0
"""A reader of systemd's journal, through `journalctl` and its export format.

Source: systemd.io/JOURNAL_EXPORT_FORMATS; journalctl(1), systemd.journal-fields(7).
"""

from __future__ import annotations

import re
import shutil
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessExitedAlready
from twisted.internet.interfaces import IReactorProcess
from twisted.internet.process import Process
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from infranetes_common.commands import ENVIRONMENT, PATH, Output, exit_code
from infranetes_common.concurrency import Notifier
from infranetes_common.errors import Unavailable

CURSOR = r"s=[0-9a-f]{32};i=[0-9a-f]{1,16};b=[0-9a-f]{32};m=[0-9a-f]{1,16};t=[0-9a-f]{1,16};x=[0-9a-f]{1,16}"
MAX_VALUE = 1024 * 1024  # bytes that are kept of a field: the journal takes hundreds of MiB
BATCH = 128  # entries whose lines become one record, if they are there together
HIGH_WATER = 256  # unread entries after which journalctl is paused
HELD_BYTES = 4 * MAX_VALUE  # of unread entries after which it is paused, too
_MAX_NAME = 64
_FIELD = re.compile(rb"[A-Z0-9_]{1,%d}" % _MAX_NAME)
_MAX_STDERR_BYTES = 2000

Entry = dict[str, bytes]


class ExportParser:
    """Parses the export format. Of a long field it keeps the beginning."""

    def __init__(self) -> None:
        self._buffer = b""
        self._entry: Entry = {}
        self._dropped = 0  # bytes that are dropped next
        self._dropping = False  # the rest of a line is dropped

    def feed(self, data: bytes) -> list[Entry]:
        """Return the entries that `data` completes. :raise ValueError: it is another format."""
        data, self._buffer = self._buffer + self._after_dropped(data), b""
        found: list[Entry] = []
        at = 0
        while (end := data.find(b"\n", at)) >= 0:
            if end == at:
                if self._entry:
                    found.append(self._entry)
                self._entry = {}
                at = end + 1
                continue
            name, equals, value = data[at:end].partition(b"=")
            if equals:
                self._keep(name, value)
                at = end + 1
                continue
            begin, size = end + 9, int.from_bytes(data[end + 1 : end + 9], "little")
            kept = min(size, MAX_VALUE)
            if len(data) < begin + kept:
                break
            self._keep(name, data[begin : begin + kept])
            self._dropped = size - kept + 1
            data, at = self._after_dropped(data[begin + kept :]), 0
        self._buffer = data[at:]
        if end < 0 and len(self._buffer) > MAX_VALUE + _MAX_NAME:
            name, equals, value = self._buffer.partition(b"=")
            self._keep(name, value)
            self._buffer, self._dropping = b"", True
        return found

    def _after_dropped(self, data: bytes) -> bytes:
        """Return what follows what is dropped."""
        if self._dropping:
            end = data.find(b"\n")
            self._dropping = end < 0
            return b"" if end < 0 else data[end + 1 :]
        dropped = min(self._dropped, len(data))
        self._dropped -= dropped
        return data[dropped:]

    def _keep(self, name: bytes, value: bytes) -> None:
        if not _FIELD.fullmatch(name):
            raise ValueError(f"{name[:_MAX_NAME]!r} is not a field of the journal")
        self._entry.setdefault(name.decode(), value[:MAX_VALUE])


class _Reader(ProcessProtocol):
    """A running journalctl."""

    transport: Process

    def __init__(self) -> None:
        self._parser = ExportParser()
        self._stderr = b""
        self._changed = Notifier()
        self._woken = False
        self._paused = False
        self._killed = False
        self.waiting: deque[Entry] = deque()
        self.held = 0  # bytes of what waits
        self.failure = ""
        self.over = False
        self.ended: Deferred[None] = Deferred()

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        if childFD == 2:
            self._stderr = (self._stderr + data)[:_MAX_STDERR_BYTES]
            return
        if self._killed:  # nobody reads it any more, nor would resume what is paused
            return
        try:
            coming = self._parser.feed(data)
            self.waiting.extend(coming)
            self.held += sum(map(_size, coming))
        except ValueError as error:
            self.failure = f"journalctl's output can't be parsed: {error}"
            self.kill()
        if (len(self.waiting) > HIGH_WATER or self.held > HELD_BYTES) and not self._paused:
            self._paused = True
            self.transport.pauseProducing()
        self._changed.notify()

    def processEnded(self, reason: Failure) -> None:
        ended = Output(exit_code(reason), b"", self._stderr)
        if ended.code and not self.failure:
            self.failure = f"journalctl {ended.how}: {ended.message()}"
        self.over = True
        self.ended.callback(None)
        self._changed.notify()

    def wake(self) -> None:
        """Let `next` return None once, now or when it is called, if there is no entry."""
        self._woken = True
        self._changed.notify()

    async def next(self) -> Entry | None:
        """Return the next entry; None at the end or after a call of `wake`."""
        while not (self.waiting or self.over or self._woken):
            await self._changed.wait()
        if not self.waiting:
            self._woken = False
            return None
        entry = self.waiting.popleft()
        self.held -= _size(entry)
        if self._paused and len(self.waiting) < HIGH_WATER // 2 and self.held <= HELD_BYTES // 2:
            self._paused = False
            if not self.over:
                self.transport.resumeProducing()
        return entry

    def kill(self) -> None:
        self._killed = True
        try:
            self.transport.signalProcess("KILL")
        except ProcessExitedAlready:
            return
        if self._paused:
            self._paused = False
            self.transport.resumeProducing()


def _size(entry: Entry) -> int:
    return sum(map(len, entry.values()))


class Entries:
    """An async iterator of journal entries. It also yields None after a call of `wake`."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader

    @property
    def more(self) -> bool:
        """Whether the next entry is there already."""
        return bool(self._reader.waiting)

    @property
    def held(self) -> int:
        """The bytes of the entries that wait to be read."""
        return self._reader.held

    def wake(self) -> None:
        """Let an iteration that waits for an entry yield None."""
        self._reader.wake()

    async def __aiter__(self) -> AsyncGenerator[Entry | None, None]:
        while True:
            entry = await self._reader.next()
            if entry is None and self._reader.over:
                if self._reader.failure:
                    raise Unavailable(self._reader.failure)
                return
            yield entry

    async def close(self) -> None:
        """End journalctl. Idempotent."""
        self._reader.failure = self._reader.failure or "closed"
        self._reader.kill()
        if not self._reader.over:
            await self._reader.ended


class Journal:
    """Opens readers of a journal.

    :param program: journalctl. :param directory: the journal's files; None for the VM's own journal.
    """

    def __init__(
        self, reactor: IReactorProcess, program: str = "journalctl", directory: Path | None = None
    ) -> None:
        self._reactor = reactor
        self._program = program
        self._directory = directory

    def open(
        self,
        matches: Sequence[str],
        fields: Sequence[str],
        cursor: str = "",
        follow: bool = False,
        since: int = 0,
    ) -> Entries:
        """Read the entries that fulfil all of `matches` (FIELD=value), oldest first. Close the result.

        :param fields: which fields to read, in addition to `__CURSOR` and the timestamps.
        :param cursor: the entry to begin with; if it has been deleted, the next one.
        :param follow: continue as the journal grows.
        :param since: skip older entries; nanoseconds since 1970.
        :raise Unavailable: journalctl is not installed.
        """
        path = shutil.which(self._program, path=PATH)
        if path is None:
            raise Unavailable(f"{self._program} is not installed; the VM's log is in systemd's journal")
        arguments = [path, "--quiet", "--no-pager", "--output=export", f"--output-fields={','.join(fields)}"]
        if self._directory is not None:
            arguments.append(f"--directory={self._directory}")
        if cursor:
            arguments.append(f"--cursor={cursor}")
        elif since:
            arguments.append(f"--since=@{since // 10**9}")
        if follow:
            arguments += ["--follow", "--no-tail"]
        reader = _Reader()
        # Not by `commands.run`: its output is read as it comes, for as long as the log is followed.
        self._reactor.spawnProcess(reader, path, [*arguments, *matches], env=ENVIRONMENT, path="/")
        reader.transport.closeStdin()
        return Entries(reader)
