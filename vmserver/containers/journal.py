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
MAX_ENTRY_BYTES = 64 * 1024 * 1024
BATCH = 128  # entries whose lines become one record, if they are there together
HIGH_WATER = 256  # unread entries after which journalctl is paused
_FIELD = re.compile(rb"[A-Z0-9_]{1,64}")
_MAX_STDERR_BYTES = 2000

Entry = dict[str, bytes]


class ExportParser:
    """Parses the export format."""

    def __init__(self) -> None:
        self._buffer = b""
        self._entry: Entry = {}

    def feed(self, data: bytes) -> list[Entry]:
        """Return the entries that `data` completes. :raise ValueError: it is another format."""
        data = self._buffer + data
        found: list[Entry] = []
        at = 0
        while (end := data.find(b"\n", at)) >= 0:
            line = data[at:end]
            name, equals, value = line.partition(b"=")
            if not line:
                if self._entry:
                    found.append(self._entry)
                self._entry = {}
                at = end + 1
                continue
            if not _FIELD.fullmatch(name):
                raise ValueError(f"{name[:64]!r} is not a field of the journal")
            if not equals:
                size = int.from_bytes(data[end + 1 : end + 9], "little")
                if len(data) < end + 9:
                    break
                if size > MAX_ENTRY_BYTES:
                    raise ValueError("an entry is too large")
                if len(data) < end + 9 + size + 1:
                    break
                value = data[end + 9 : end + 9 + size]
                end = end + 9 + size
            self._entry.setdefault(name.decode(), value)
            at = end + 1
        self._buffer = data[at:]
        return found


class _Reader(ProcessProtocol):
    """A running journalctl."""

    transport: Process

    def __init__(self) -> None:
        self._parser = ExportParser()
        self._stderr = b""
        self._changed = Notifier()
        self._woken = False
        self._paused = False
        self.waiting: deque[Entry] = deque()
        self.failure = ""
        self.over = False
        self.ended: Deferred[None] = Deferred()

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        if childFD == 2:
            self._stderr = (self._stderr + data)[:_MAX_STDERR_BYTES]
            return
        try:
            self.waiting.extend(self._parser.feed(data))
        except ValueError as error:
            self.failure = f"journalctl's output can't be parsed: {error}"
            self.kill()
        if len(self.waiting) > HIGH_WATER and not self._paused:
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
        if self._paused and len(self.waiting) < HIGH_WATER // 2:
            self._paused = False
            if not self.over:
                self.transport.resumeProducing()
        return entry

    def kill(self) -> None:
        try:
            self.transport.signalProcess("KILL")
        except ProcessExitedAlready:
            return
        if self._paused:
            self._paused = False
            self.transport.resumeProducing()


class Entries:
    """An async iterator of journal entries. It also yields None after a call of `wake`."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader

    @property
    def more(self) -> bool:
        """Whether the next entry is there already."""
        return bool(self._reader.waiting)

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
