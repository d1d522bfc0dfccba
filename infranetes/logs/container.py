# SPDX-License-Identifier: Apache-2.0
"""One container's log, from the agent's stream to the file that kubelet reads."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import partial
from pathlib import Path

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.logs.batch import batched
from infranetes.logs.files import LogFiles
from infranetes.logs.writer import RETRY_SECONDS, Checkpoint, InThread, LogWriter
from infranetes_common.concurrency import backoff, sleep, start, until_ended, within
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from infranetes_common.reactors import IReactor
from infranetes_common.wire import vmserver

CUT_SECONDS = 2.0  # for what was read to be written, when no more comes
ENDS = "this log ends here: {why}; what was written last may be missing"
STOPPED_AT_ONCE = 50  # logs in one turn of the reactor: stopping one takes about 100 microseconds

_log = Logger()

Read = Callable[[str], AsyncGenerator[vmserver.LogRecord, None]]


async def make_file(reactor: IReactor, path: Path, in_thread: InThread = batched) -> None:
    """Make a log's file, and the directories to it, where they are missing.

    :raise ResourceExhausted: there is no room for it. :raise FailedPrecondition: it can't be made.
    """
    try:
        await in_thread(reactor, LogFiles().current, path)
    except OSError as error:
        raise _as_refusal(path, "made", error) from None


def _as_refusal(path: Path, what: str, error: OSError) -> InfranetesError:
    kind = ResourceExhausted if error.errno in (errno.ENOSPC, errno.EDQUOT) else FailedPrecondition
    return kind(f"the log {path} can't be {what}: {error.strerror}; make room or look there")


class ContainerLog:
    """Writes a container's records into the file at `path` until the container has ended.

    :param read: called with a cursor, an async generator of the records after it that waits for new ones and
        ends when the container has ended and all is read. When it fails it is called again after a pause.
    :param checkpoint: what was saved last; None: nothing yet.
    :param save: stores a checkpoint where it survives the daemon.
    :param in_thread: makes blocking calls elsewhere, by default in the logs' own threads.
    :ivar lacking: whether lines are known to be missing; the log itself says where.
    :ivar finished: fires when the container has ended and all that it wrote is in the file and in a
        checkpoint. Fails only if the agent says that the cursor is not one of this log. After `stop` it no
        longer fires.
    """

    def __init__(
        self,
        reactor: IReactor,
        path: Path,
        read: Read,
        checkpoint: Checkpoint | None,
        save: Callable[[Checkpoint], Awaitable[None]],
        *,
        files: LogFiles | None = None,
        in_thread: InThread = batched,
    ) -> None:
        self.finished: Deferred[None] = Deferred()
        self._reactor = reactor
        self._path = path
        self._read = read
        self._writer = LogWriter(reactor, path, checkpoint, save, files or LogFiles(), in_thread)
        self._reader: Deferred[None] | None = None
        self._stopping = False
        self._gap = False  # whether this reading's gap was logged
        self.lacking = False

    def start(self) -> None:
        """Begin, or continue from the checkpoint. Call it once."""
        self._reader = start(self._run())
        self._reader.addErrback(self._failed)

    async def open(self) -> None:
        """Open the file to continue in, made if need be. Idempotent.

        :raise OSError: it can't be opened now. After `start` that is tried again all the same.
        """
        await self._writer.resume()

    async def reopen(self) -> None:
        """Continue in the file at the path, made if it is missing: kubelet has renamed the old one.

        If that fails, writing continues in the old one.

        :raise ResourceExhausted: there is no room for the new file.
        :raise FailedPrecondition: the new file can't be made.
        """
        try:
            await self._writer.reopen()
        except OSError as error:
            raise _as_refusal(self._path, "reopened", error) from None

    async def stop(self) -> None:
        """Stop writing and save the position, from which a later log continues. Idempotent."""
        self._stopping = self._writer.stopping = True
        if self._reader is not None:
            self._reader.cancel()
            await until_ended(self._reader)
        await self._writer.stop()

    @property
    def progress(self) -> object:
        """What changes as the log advances."""
        return self._writer.progress

    async def say(self, text: str) -> None:
        """Append a line of our own, between two records.

        :raise OSError: it can't be written."""
        await self._writer.say(text)

    async def cut(self, why: str) -> None:
        """Write what was read, and why that is all. Nothing more is read."""
        if self._reader is not None:
            self._stopping = True
            self._reader.cancel()
            await until_ended(self._reader)
        with contextlib.suppress(DeadlineExceeded):
            await within(self._reactor, CUT_SECONDS, self._writer.drained(), "writing what was read")
        await self.stop()
        await self._writer.say(ENDS.format(why=why), last=True)

    async def _run(self) -> None:
        await self._retry("found", self._writer.resume)
        pauses = backoff(*RETRY_SECONDS)
        while True:
            cursor = self._writer.cursor
            try:
                await self._read_records()
                break
            except CancelledError:
                raise
            except InvalidArgument:
                await self._end("its VM no longer knows how far it was read")
                raise
            except NotFound as error:
                _log.warn(
                    "the log {path} ends here, its container is gone: {error}",
                    path=str(self._path),
                    error=str(error),
                )
                await self._end("its container is gone from the VM")
                break
            except InfranetesError as error:  # the records are still there
                _log.info("the log {path} is read again: {error}", path=str(self._path), error=str(error))
            except Exception:
                _log.failure("reading the log {path} failed", path=str(self._path))
            if self._writer.cursor != cursor:
                pauses = backoff(*RETRY_SECONDS)
            await self._writer.pause(next(pauses))
        await self._writer.drained()
        await self._retry("finished", self._writer.finish)
        if not self._stopping:
            self.finished.callback(None)

    async def _end(self, why: str) -> None:
        self.lacking = True
        await self._writer.drained()
        await self._retry("finished", partial(self._writer.say, ENDS.format(why=why), last=True))

    async def _read_records(self) -> None:
        self._gap = False
        records = self._read(self._writer.cursor)
        async with aclosing(records):
            async for record in records:
                if record.gap and not self._gap:
                    self._gap = self.lacking = True
                    _log.warn(
                        "the log {path} lacks records that were rotated away in the VM", path=str(self._path)
                    )
                self._writer.add(record)
                if self._writer.full:
                    await self._writer.drained()

    async def _retry(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        """Call `work` until it succeeds."""
        pauses = backoff(*RETRY_SECONDS)
        while True:
            try:
                return await work()
            except CancelledError:
                raise
            except Exception as error:
                seconds = next(pauses)
                _log.error(
                    "the log {path} can't be {what}, next try in {seconds} s: {error}",
                    path=str(self._path), what=what, seconds=seconds, error=error,
                )  # fmt: skip
            await self._writer.pause(seconds)

    def _failed(self, failure: Failure) -> None:
        if self._stopping:
            failure.trap(CancelledError, Exception)
            return
        _log.failure("writing the log {path} failed", failure=failure, path=str(self._path))
        self.finished.errback(failure)


async def stop_all(reactor: IReactor, logs: Iterable[ContainerLog]) -> None:
    """Stop all logs side by side, some in each turn of the reactor. One that fails stops no other."""
    stopping: list[Deferred[None]] = []
    for number, log in enumerate(logs, 1):
        stopped = start(log.stop())
        stopped.addErrback(lambda failure: _log.failure("stopping a log failed", failure=failure))
        stopping.append(stopped)
        if number % STOPPED_AT_ONCE == 0:
            await sleep(reactor, 0)
    for stopped in stopping:
        await stopped
