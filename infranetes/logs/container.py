"""One container's log, from the agent's stream to the file that kubelet reads: each byte exactly once.

A checkpoint says: all records up to `cursor` are in files, the last of them ends at byte `size` of the
file with `inode`. It is saved now and then, and always before the first byte goes into another file.
So whatever ends the daemon, at most that one file has bytes beyond the checkpoint, and they are the
beginning of what the records after `cursor` render to: the next daemon reads those records again,
passes over what the file has, and goes on writing in the middle of a line if need be.

    the file that the checkpoint names    at the log's path is        goes on in
    at the log's path                     that file                   it
    renamed by kubelet                    nothing (reopen will come)  it, until reopen
    renamed by kubelet                    another file                it to the end of the record that
                                                                      is there in parts, then the other
    nowhere, or shorter than it was       anything                    the file at the path
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredLock
from twisted.internet.task import deferLater
from twisted.logger import Logger

from infranetes.logs.batch import batched
from infranetes.logs.files import Found, Gone, LogFiles
from infranetes.logs.render import render
from infranetes.threads import settled
from infranetes_common.errors import (
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)

BATCH_BYTES = 256 * 1024  # more than this is not held in memory: reading waits
CHECKPOINT_BYTES = 1 << 20  # saved after so many bytes
CHECKPOINT_SECONDS = 10.0  # or so long after the first byte that was not covered
STOPPED_AT_ONCE = 50  # of very many logs: stopping one costs about 100 microseconds
RETRY_SECONDS = (0.1, 5.0)  # first and longest pause before another try to read or to write

_log = Logger()


@attrs.frozen
class Checkpoint:
    """How far a log is written. `cursor`: the agent's, "" before the first record."""

    cursor: str
    inode: int
    size: int


Read = Callable[[str], AsyncIterator[Any]]
Save = Callable[[Checkpoint], Awaitable[None]]


class ContainerLog:
    """Writes what `read` gives into the file at `path`, until it ends.

    :param read: LogRecords after a cursor, following; ends when the container has ended and all is
        read. When it fails it is asked again after a pause, from the last record on.
    :param checkpoint: what was saved last, None: nothing yet.
    :param save: keeps a checkpoint where it survives the daemon.
    :param in_thread: calls blocking work elsewhere; by default in the reactor's threads.
    :ivar finished: fires with None when the container has ended and all that it wrote is in the file
        and in a checkpoint. Fails only if the agent says that the cursor is not one of this log.
        After `stop` it does not fire any more.
    """

    def __init__(
        self,
        reactor: Any,
        path: Path,
        read: Read,
        checkpoint: Checkpoint | None,
        save: Save,
        *,
        files: LogFiles | None = None,
        in_thread: Callable[..., Awaitable[Any]] = batched,
    ) -> None:
        self.finished: Deferred[None] = Deferred()
        self._reactor = reactor
        self._path = path
        self._read = read
        self._save = save
        self._files = files or LogFiles()
        self._in_thread = in_thread
        self._saved = checkpoint
        self._written = checkpoint or Checkpoint("", 0, 0)  # what is in files, to a record's end
        self._cursor = self._written.cursor  # of the last record that was read
        self._resumed = False
        self._tail = b""  # what the file has beyond the checkpoint, until all of it has been met again
        self._met = 0  # bytes of the tail that have
        self._torn = False  # the buffer begins with the rest of a record whose beginning is in the file
        self._end = 0  # bytes of the file, tail included
        self._move = False  # the file at the path is another one: go on there when the tail is met
        self._buffer: list[bytes] = []  # per record, what is to be written
        self._buffered = 0
        self._lock = DeferredLock()  # one piece of work on files at a time
        self._writing = False
        self._idle: Deferred[None] | None = None  # somebody waits for the writer to be through
        self._reader: Deferred[None] | None = None
        self._timer: Any = None
        self._pauses: set[Deferred[None]] = set()
        self._stopping = False

    # ---- Outside -----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin, or go on where the checkpoint says. Once."""
        self._reader = Deferred.fromCoroutine(self._run())
        self._reader.addErrback(self._failed)

    async def open(self) -> None:
        """Have the file that is gone on in, made if need be; it is open already: nothing to do.

        :raise OSError: it can't be had now. It is tried again all the same, from `start` on."""
        await self._resume()

    async def reopen(self) -> None:
        """What comes from now on goes into the file at the path, made if it is not there: kubelet has
        renamed the one that was. When it fails, writing goes on in the old one.

        :raise ResourceExhausted: :raise FailedPrecondition: the new file can't be made.
        """
        try:
            await self._locked(self._reopen)
        except OSError as e:
            kind = ResourceExhausted if e.errno in (errno.ENOSPC, errno.EDQUOT) else FailedPrecondition
            raise kind(
                f"the log {self._path} can't be reopened: {e.strerror}; make room or look there"
            ) from None

    async def stop(self) -> None:
        """Leave off; a later log goes on from what is saved here. Twice is once."""
        self._stopping = True
        if self._reader is not None:
            self._reader.cancel()
            await settled(self._reader)
        for pause in [*self._pauses]:
            if not pause.called:
                pause.callback(None)
        while self._writing:
            await self._through()
        await self._checkpoint_or_not()

    # ---- Reading -----------------------------------------------------------------------------

    async def _run(self) -> None:
        await self._patiently("found", self._resume)
        pause = RETRY_SECONDS[0]
        while True:
            cursor = self._cursor
            try:
                await self._follow()
                break
            except (CancelledError, InvalidArgument):
                raise
            except NotFound as e:
                _log.warn(
                    "the log {path} ends here, its container is gone: {error}", path=self._p, error=str(e)
                )
                break
            except InfranetesError as e:  # the records are still there
                _log.info("the log {path} is read again: {error}", path=self._p, error=str(e))
            except Exception:
                _log.failure("reading the log {path}", path=self._p)
            pause = RETRY_SECONDS[0] if self._cursor != cursor else pause
            await self._pause(pause)
            pause = min(pause * 2, RETRY_SECONDS[1])
        while self._writing:
            await self._through()
        await self._patiently("finished", self._finish)
        if not self._stopping:
            self.finished.callback(None)

    async def _follow(self) -> None:
        records: Any = self._read(self._cursor)
        try:
            async for record in records:
                self._take(record)
                while self._buffered >= BATCH_BYTES:
                    await self._through()
        finally:
            await records.aclose()

    def _take(self, record: Any) -> None:
        """One record into the buffer, without the bytes that the file has already."""
        if record.gap:
            _log.warn("the log {path} lacks records that were rotated away in the VM", path=self._p)
        data = render(record)
        self._cursor = record.cursor
        if self._tail:
            known = min(len(data), len(self._tail) - self._met)
            if self._tail.startswith(data[:known], self._met):
                data = data[known:]
                self._met += known
            else:
                _log.error("the log {path} has lines that its container did not write", path=self._p)
                self._met = len(self._tail)
            if self._met < len(self._tail):
                return
            self._tail, self._met = b"", 0
            self._torn = data != b""
            if not self._torn:  # all of the tail is whole records: they are written
                self._written = attrs.evolve(self._written, cursor=self._cursor, size=self._end)
        self._buffer.append(data)
        self._buffered += len(data)
        if not self._writing and not self._stopping:
            self._writing = True
            Deferred.fromCoroutine(self._write_out())

    def _failed(self, failure: Any) -> None:
        if self._stopping:
            failure.trap(CancelledError, Exception)
            return
        _log.failure("the log {path} can't go on", failure=failure, path=self._p)
        self.finished.errback(failure)

    # ---- Writing -----------------------------------------------------------------------------

    async def _write_out(self) -> None:
        """Until the buffer is empty: what came while one piece was written is the next piece."""
        pause = RETRY_SECONDS[0]
        while self._buffer and not self._stopping:
            try:
                await self._locked(self._flush)
                pause = RETRY_SECONDS[0]
            except Exception as e:  # nothing is lost: it stays in the buffer, and with the agent
                _log.error(
                    "the log {path} can't be written, again in {seconds} s: {error}",
                    path=self._p, seconds=pause, error=e,
                )  # fmt: skip
                await self._pause(pause)
                pause = min(pause * 2, RETRY_SECONDS[1])
        self._writing = False
        idle, self._idle = self._idle, None
        if idle is not None and not idle.called:
            idle.callback(None)

    async def _flush(self) -> None:
        """All of the buffer into the file."""
        data, count, cursor = b"".join(self._buffer), len(self._buffer), self._cursor
        if data:
            try:
                self._end = await self._thread(self._files.append, self._path, self._written.inode, data)
            except Gone:  # removed by somebody: from here on in the one at the path
                await self._switch(await self._thread(self._files.current, self._path))
                self._end = await self._thread(self._files.append, self._path, self._written.inode, data)
        del self._buffer[:count]
        self._buffered -= len(data)
        self._written = attrs.evolve(self._written, cursor=cursor, size=self._end)
        self._torn = False
        if self._move:
            await self._reopen()
            self._move = False
        if self._saved is None or self._end - self._saved.size >= CHECKPOINT_BYTES:
            await self._checkpoint()
        elif self._timer is None:
            self._timer = self._reactor.callLater(CHECKPOINT_SECONDS, self._tick)

    # ---- Files and checkpoints; all with the lock --------------------------------------------

    async def _resume(self) -> None:
        await self._locked(self._resume_once)

    async def _resume_once(self) -> None:
        """Find the file to go on in, by the table above."""
        if self._resumed:
            return
        start = self._saved
        if start is not None:
            try:
                found = await self._thread(self._files.find, self._path, start.inode)
                if found.size >= start.size:
                    self._tail = await self._thread(self._files.tail, self._path, start.inode, start.size)
                    self._end = start.size + len(self._tail)
                    self._move = not found.at_path and await self._thread(self._files.at, self._path) != 0
                    if self._move and not self._tail:
                        await self._switch(await self._thread(self._files.current, self._path))
                        self._move = False
                    self._resumed = True
                    return
            except Gone:
                pass
            _log.warn("the log {path} is not what it was, a part of it may be lost", path=self._p)
        await self._switch(await self._thread(self._files.current, self._path))
        self._resumed = True

    async def _reopen(self) -> None:
        """Pieces are written whole, so the old file ends with a record, unless it has a tail."""
        await self._resume_once()
        there = await self._thread(self._files.at, self._path)
        if there == self._written.inode:
            return
        found = await self._thread(self._files.current, self._path)
        if self._tail or self._torn:
            self._move = True
            return
        try:
            await self._switch(found)
        except Exception:
            if not there:
                await self._thread(self._path.unlink)
            raise

    async def _finish(self) -> None:
        if self._tail:
            _log.error("the log {path} has lines that its container did not write", path=self._p)
            self._tail, self._met = b"", 0
            self._written = attrs.evolve(self._written, cursor=self._cursor, size=self._end)
        await self._locked(self._checkpoint)

    async def _switch(self, found: Found) -> None:
        """Write into that file from now on: not before a checkpoint says so."""
        target = Checkpoint(self._written.cursor, found.inode, found.size)
        await self._save(target)
        self._saved = self._written = target
        self._end = found.size

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
        Deferred.fromCoroutine(self._checkpoint_or_not())

    async def _checkpoint_or_not(self) -> None:
        try:
            await self._locked(self._checkpoint)
        except Exception as e:  # an older position will do: more is read again
            _log.warn("the position of the log {path} is not saved: {error}", path=self._p, error=e)

    # ---- Waiting -----------------------------------------------------------------------------

    async def _patiently(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        """`work`, again and again until it succeeds."""
        pause = RETRY_SECONDS[0]
        while True:
            try:
                return await work()
            except CancelledError:
                raise
            except Exception as e:
                _log.error(
                    "the log {path} can't be {what}, again in {seconds} s: {error}",
                    path=self._p, what=what, seconds=pause, error=e,
                )  # fmt: skip
            await self._pause(pause)
            pause = min(pause * 2, RETRY_SECONDS[1])

    def _through(self) -> Deferred[None]:
        """Fires when the writer has nothing left. One wait at a time."""
        self._idle = Deferred()
        return self._idle

    async def _pause(self, seconds: float) -> None:
        pause: Deferred[None] = Deferred()
        timer = self._reactor.callLater(seconds, pause.callback, None)
        self._pauses.add(pause)
        try:
            await pause
        finally:
            self._pauses.discard(pause)
            if timer.active():
                timer.cancel()

    async def _locked(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await self._lock.run(lambda: Deferred.fromCoroutine(work()))

    async def _thread(self, work: Callable[..., Any], *args: Any) -> Any:
        return await self._in_thread(self._reactor, work, *args)

    @property
    def _p(self) -> str:
        return str(self._path)


async def stop_all(reactor: Any, logs: Iterable[ContainerLog]) -> None:
    """Stop every one, side by side, however many: no turn of the reactor begins them all. One that
    fails is logged and stops no other."""
    stopping: list[Deferred[None]] = []
    for number, log in enumerate(logs, 1):
        stopped = Deferred.fromCoroutine(log.stop())
        stopped.addErrback(lambda failure: _log.failure("stopping a log", failure=failure))
        stopping.append(stopped)
        if number % STOPPED_AT_ONCE == 0:
            await deferLater(reactor, 0)
    for stopped in stopping:
        await stopped
