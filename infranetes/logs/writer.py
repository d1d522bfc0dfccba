# SPDX-License-Identifier: Apache-2.0
"""The translation of a container's records to the bytes of its log file, each exactly once.

A checkpoint says: all records up to `cursor` are in files, and the last of them ends at byte `size` of the
file with `inode`. It is saved now and then, and always before the first byte goes into another file. So
however the daemon ends, at most that one file has bytes beyond the checkpoint, and these begin what the
records after `cursor` render to, but for times that are those of reading, as a serial console's. The next
daemon reads those records again, skips what the file has already, and continues, in the middle of a line if
need be.

    the file that the checkpoint names    at the log's path is        writing continues in
    at the log's path                     that file                   it
    renamed by kubelet                    nothing (reopen will come)  it, until reopen
    renamed by kubelet                    another file                it, to the end of the record that
                                                                      is there in parts, and of a line
                                                                      in parts, then the other
    nowhere, or shorter than it was       anything                    the file at the path
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar, TypeVarTuple

import attrs
from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger

from infranetes.logs.files import Found, Gone, LogFiles
from infranetes_common.concurrency import Notifier, backoff, start
from infranetes_common.cri_log import last_parts, notice, render, timestamp
from infranetes_common.reactors import IReactor
from infranetes_common.wire import vmserver

BATCH_BYTES = 256 * 1024  # the most that is held in memory: reading waits for room
CHECKPOINT_BYTES = 1 << 20  # a checkpoint is saved after this many bytes
LATE_BYTES = 1 << 20  # of a line in parts, that are waited for before writing continues in another file
CHECKPOINT_SECONDS = 10.0  # or this long after the first byte that the last one does not cover
RETRY_SECONDS = (0.1, 5.0)  # the first and the longest pause before another try to read or to write

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_log = Logger()


@attrs.frozen
class Checkpoint:
    """The point up to which a log is written.

    :ivar cursor: the agent's cursor of the last record; "" before the first one.
    """

    cursor: str
    inode: int
    size: int


class InThread(Protocol):
    """Makes a blocking call elsewhere: `batched`, or `run_in_thread`."""

    def __call__(self, reactor: IReactor, work: Callable[[*Ts], T], /, *args: *Ts) -> Awaitable[T]: ...


_TIME = re.compile(rb"^.{1,%d}" % len(timestamp(0)), re.MULTILINE)


def _untimed(lines: bytes) -> bytes:
    """Return whole lines, the last of which may be cut, without their times, and as long."""
    return _TIME.sub(lambda time: b"-" * len(time[0]), lines)


class LogWriter:
    """Appends records to a log file, and keeps the checkpoint.

    :param checkpoint: what was saved last; None: nothing yet.
    :param save: stores a checkpoint where it survives the daemon.
    :ivar cursor: of the last record that was added.
    :ivar stopping: set it before `stop`: nothing more is written.
    """

    def __init__(
        self,
        reactor: IReactor,
        path: Path,
        checkpoint: Checkpoint | None,
        save: Callable[[Checkpoint], Awaitable[None]],
        files: LogFiles,
        in_thread: InThread,
    ) -> None:
        self._reactor = reactor
        self._path = path
        self._save = save
        self._files = files
        self._in_thread = in_thread
        self._saved = checkpoint
        self._written = checkpoint or Checkpoint("", 0, 0)  # the position in the files, at a record's end
        self.cursor = self._written.cursor
        self._resumed = False
        self._tail = b""  # the file's bytes beyond the checkpoint, until their records are read again
        self._matched = 0  # bytes of the tail whose records were read again
        self._torn = False  # the buffer begins with the rest of a record whose beginning is in the file
        self._end = 0  # the file's size, tail included
        self._move = False  # another file is at the path: continue there after the tail, and a line in parts
        self._latest = 0  # the size of this file at which it does not matter whether a line is in parts
        self._open: dict[vmserver.LogRecord.Stream, bool] = {}  # whether the last line of each stream goes on
        self._buffer: list[bytes] = []  # the records to write
        self._buffered = 0
        self._lock = DeferredLock()  # one piece of work on files at a time
        self._writing = False
        self._drained = Notifier()
        self._timer: IDelayedCall | None = None
        self._pauses: set[Deferred[None]] = set()
        self.stopping = False

    # ---- Called by ContainerLog

    @property
    def full(self) -> bool:
        """Whether nothing should be added before the buffer is drained."""
        return self._buffered >= BATCH_BYTES

    def add(self, record: vmserver.LogRecord) -> None:
        """Have a record written, without the bytes that the file has already."""
        data = render(record)
        self.cursor = record.cursor
        if self._tail:
            common = min(len(data), len(self._tail) - self._matched)
            in_file = self._tail[self._matched : self._matched + common]
            if in_file == data[:common] or _untimed(in_file) == _untimed(data[:common]):
                data = data[common:]
                self._matched += common
            else:
                self._warn_of_strange_lines()
                self._matched = len(self._tail)
            if self._matched < len(self._tail):
                return
            self._tail, self._matched = b"", 0
            self._torn = data != b""
            if not self._torn:  # the tail was whole records, so they are written
                self._written = attrs.evolve(self._written, cursor=self.cursor, size=self._end)
        self._buffer.append(data)
        self._buffered += len(data)
        if not self._writing and not self.stopping:
            self._writing = True
            start(self._write_out())

    @property
    def progress(self) -> object:
        """What changes as the log advances."""
        return self.cursor, self._end

    async def drained(self) -> None:
        """Wait until all that was added is written."""
        while self._writing:
            await self._drained.wait()

    async def resume(self) -> None:
        """Open the file to continue in, by the table above. Idempotent."""
        async with self._lock:
            await self._resume()

    async def reopen(self) -> None:
        """Continue in the file at the path, which is made if it is missing.

        :raise OSError: it can't be made; writing continues in the old one.
        """
        async with self._lock:
            await self._reopen()

    async def say(self, text: str, *, last: bool = False) -> None:
        """Append a line of our own between two records, or as the `last` one.

        Nothing is appended where a record would be cut by it.

        :raise OSError: it can't be written.
        """
        async with self._lock:
            await self._resume()
            if not last and (self._tail or self._buffer):
                return
            await self._checkpoint()  # what is beyond it when the daemon is killed now is the line alone
            line = notice(timestamp(int(self._reactor.seconds() * 1e9)), text)
            path, inode = self._path, self._written.inode
            try:
                if self._end and await self._thread(self._files.tail, path, inode, self._end - 1) != b"\n":
                    line = b"\n" + line
                self._end = await self._thread(self._files.append, path, inode, line)
            except Gone:  # somebody has removed the log: there is nothing to add to
                return
            self._tail, self._matched = b"", 0
            self._written = attrs.evolve(self._written, size=self._end)
            await self._checkpoint()

    async def finish(self) -> None:
        """Save the last checkpoint: all records were added and written."""
        if self._tail:
            self._warn_of_strange_lines()
            self._tail, self._matched = b"", 0
            self._written = attrs.evolve(self._written, cursor=self.cursor, size=self._end)
        async with self._lock:
            await self._checkpoint()

    async def stop(self) -> None:
        """End pauses, wait for what is being written, and save a checkpoint."""
        for pause in [*self._pauses]:
            if not pause.called:
                pause.callback(None)
        await self.drained()
        await self._try_checkpoint()

    async def pause(self, seconds: float) -> None:
        """Sleep, but only until `stop`."""
        pause: Deferred[None] = Deferred()
        timer = self._reactor.callLater(seconds, pause.callback, None)
        self._pauses.add(pause)
        try:
            await pause
        finally:
            self._pauses.discard(pause)
            if timer.active():
                timer.cancel()

    # ---- Writing

    async def _write_out(self) -> None:
        """Write until the buffer is empty. What comes during one write is the next one."""
        pauses = backoff(*RETRY_SECONDS)
        while self._buffer and not self.stopping:
            try:
                async with self._lock:
                    await self._flush()
                pauses = backoff(*RETRY_SECONDS)
            except Exception as error:  # nothing is lost: the buffer keeps the records, and so does the agent
                seconds = next(pauses)
                _log.error(
                    "the log {path} can't be written, next try in {seconds} s: {error}",
                    path=str(self._path), seconds=seconds, error=error,
                )  # fmt: skip
                await self.pause(seconds)
        self._writing = False
        self._drained.notify()

    async def _flush(self) -> None:
        """Append the whole buffer to the file."""
        data, count, cursor = b"".join(self._buffer), len(self._buffer), self.cursor
        if data:
            try:
                self._end = await self._thread(self._files.append, self._path, self._written.inode, data)
            except Gone:  # the file was removed: continue in the one at the path
                await self._switch(await self._thread(self._files.current, self._path))
                self._end = await self._thread(self._files.append, self._path, self._written.inode, data)
        del self._buffer[:count]
        self._buffered -= len(data)
        self._written = attrs.evolve(self._written, cursor=cursor, size=self._end)
        self._torn = False
        for stream, (_, goes_on) in last_parts(data).items():
            self._open[stream] = goes_on
        if self._move:
            await self._reopen()
        if self._saved is None or self._end - self._saved.size >= CHECKPOINT_BYTES:
            await self._checkpoint()
        elif self._timer is None:
            self._timer = self._reactor.callLater(CHECKPOINT_SECONDS, self._tick)

    # ---- Files and checkpoints; the lock is held

    async def _resume(self) -> None:
        if self._resumed:
            return
        saved = self._saved
        if saved is not None:
            try:
                file = await self._thread(self._files.find, self._path, saved.inode)
                if file.size >= saved.size:
                    await self._resume_in(file, saved)
                    self._resumed = True
                    return
            except Gone:
                pass
            _log.warn(
                "the log {path} was changed by somebody else, a part of it may be lost", path=str(self._path)
            )
        await self._switch(await self._thread(self._files.current, self._path))
        self._resumed = True

    async def _resume_in(self, file: Found, saved: Checkpoint) -> None:
        self._tail = await self._thread(self._files.tail, self._path, saved.inode, saved.size)
        self._end = saved.size + len(self._tail)
        self._move = not file.at_path and await self._thread(self._files.at, self._path) != 0
        if self._move and not self._tail:
            await self._switch(await self._thread(self._files.current, self._path))
            self._move = False

    async def _reopen(self) -> None:
        # The buffer is written whole, so the old file ends with a record, unless it has a tail.
        await self._resume()
        inode = await self._thread(self._files.at, self._path)
        if inode == self._written.inode:
            self._move = False
            return
        file = await self._thread(self._files.current, self._path)
        asked, self._move = self._move, True
        if not asked:
            self._latest = self._end + LATE_BYTES
        if self._tail or self._torn or (any(self._open.values()) and self._end < self._latest):
            return
        try:
            await self._switch(file)
            self._move = False
        except Exception:
            self._move = asked
            if not inode:
                await self._thread(self._path.unlink)
            raise

    async def _switch(self, file: Found) -> None:
        """Write into another file from now on; save a checkpoint that says so first."""
        target = Checkpoint(self._written.cursor, file.inode, file.size)
        await self._save(target)
        self._saved = self._written = target
        self._end = file.size

    async def _checkpoint(self) -> None:
        if self._timer is not None:
            timer, self._timer = self._timer, None
            if timer.active():
                timer.cancel()
        if self._resumed and self._written != self._saved:
            target = self._written
            await self._save(target)
            self._saved = target

    def _tick(self) -> None:
        self._timer = None
        start(self._try_checkpoint())

    async def _try_checkpoint(self) -> None:
        try:
            async with self._lock:
                await self._checkpoint()
        except Exception as error:  # the older checkpoint will do: more records are read again then
            _log.warn(
                "the position in the log {path} is not saved: {error}", path=str(self._path), error=error
            )

    async def _thread(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        return await self._in_thread(self._reactor, work, *args)

    def _warn_of_strange_lines(self) -> None:
        _log.error("the log {path} has lines that its container did not write", path=str(self._path))
