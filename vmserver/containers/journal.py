"""The machine's journal, read through `journalctl`: its own entries in its own format, from exact places on.

Source: systemd.io/JOURNAL_EXPORT_FORMATS; journalctl(1), systemd.journal-fields(7).
"""

from __future__ import annotations

import re
import shutil
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessExitedAlready
from twisted.internet.protocol import ProcessProtocol

from infranetes_common.errors import Unavailable

CURSOR = r"s=[0-9a-f]{32};i=[0-9a-f]{1,16};b=[0-9a-f]{32};m=[0-9a-f]{1,16};t=[0-9a-f]{1,16};x=[0-9a-f]{1,16}"
MAX_ENTRY_BYTES = 64 * 1024 * 1024
HIGH_WATER = 256  # entries that wait for their reader
_FIELD = re.compile(rb"[A-Z0-9_]{1,64}")
_KEPT_OF_ERRORS = 2000

Entry = dict[str, bytes]


class ExportParser:
    """Bytes of the export format in, entries out."""

    def __init__(self) -> None:
        self._buffer = b""
        self._entry: Entry = {}

    def feed(self, data: bytes) -> list[Entry]:
        """The entries that `data` completes. :raise ValueError: it is not that format."""
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
                raise ValueError(f"{name[:64]!r} is no field of the journal's")
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
    """One journalctl."""

    transport: Any

    def __init__(self) -> None:
        self._parser = ExportParser()
        self._errors = b""
        self._wake: Deferred[None] | None = None
        self._paused = False
        self.waiting: deque[Entry] = deque()
        self.failure = ""
        self.over = False
        self.ended: Deferred[None] = Deferred()

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        if childFD == 2:
            self._errors = (self._errors + data)[:_KEPT_OF_ERRORS]
            return
        try:
            self.waiting.extend(self._parser.feed(data))
        except ValueError as error:
            self.failure = f"journalctl writes what can't be read: {error}"
            self.kill()
        if len(self.waiting) > HIGH_WATER and not self._paused:
            self._paused = True
            self.transport.pauseProducing()
        self.notify()

    def processEnded(self, reason: Any) -> None:
        code = reason.value.exitCode
        if code and not self.failure:
            words = self._errors.decode(errors="replace").strip()
            self.failure = f"journalctl failed: {words or f'exit code {code}'}"
        self.over = True
        self.ended.callback(None)
        self.notify()

    def notify(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None and not wake.called:
            wake.callback(None)

    async def next(self) -> Entry | None:
        """The next entry; None: there will be none, or `notify` was called without one."""
        if not self.waiting and not self.over:
            self._wake = Deferred()
            await self._wake
        if not self.waiting:
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


class Following:
    """Entries as they are read. `wake` lets an iteration that waits yield None."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader

    def wake(self) -> None:
        """Yield None now, if nothing else is there."""
        self._reader.notify()

    async def __aiter__(self) -> AsyncIterator[Entry | None]:
        while True:
            entry = await self._reader.next()
            if entry is None and self._reader.over:
                if self._reader.failure:
                    raise Unavailable(self._reader.failure)
                return
            yield entry

    async def close(self) -> None:
        """End the program. Twice is once."""
        self._reader.failure = self._reader.failure or "closed"
        self._reader.kill()
        if not self._reader.over:
            await self._reader.ended


class Journal:
    """Where entries are read from.

    :param program: journalctl. :param directory: the journal's files; None: the machine's own journal.
    """

    def __init__(self, reactor: Any, program: str = "journalctl", directory: Path | None = None) -> None:
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
    ) -> Following:
        """All entries with each of `matches` (FIELD=value), oldest first. `close` what this answers.

        :param fields: those that are wanted; each entry also has its `__CURSOR` and its times.
        :param cursor: begin with the entry that has it or, where that is gone, with the next one.
        :param follow: go on as it grows. :param since: nanoseconds since 1970; nothing older.
        :raise Unavailable: there is no journalctl.
        """
        path = shutil.which(self._program)
        if path is None:
            raise Unavailable(f"there is no {self._program} on this machine; its log is in systemd's journal")
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
        environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
        self._reactor.spawnProcess(reader, path, [*arguments, *matches], env=environment, path="/")
        reader.transport.closeStdin()
        return Following(reader)
