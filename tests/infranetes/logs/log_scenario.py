# SPDX-License-Identifier: Apache-2.0
"""A container that writes, a kubelet that rotates, and a daemon that is killed at any byte."""

from __future__ import annotations

import datetime
import errno
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, cast

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock, deferLater

from infranetes.logs import Checkpoint, ContainerLog
from infranetes.logs.files import Found, LogFiles
from infranetes_common.errors import Unavailable
from infranetes_common.wire import vmserver

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def record(number: int, line: bytes, *, partial: bool = False, stream: int = 0, time: int = 0) -> Any:
    """Return a LogRecord; its cursor is its number."""
    return vmserver.LogRecord(
        time_nanos=time or 1_700_000_000_000_000_000 + number, stream=cast(Any, stream), line=line,
        partial=partial, cursor=str(number),
    )  # fmt: skip


def expected(records: list[Any]) -> bytes:
    """Return the file's content, formatted independently of the code under test."""
    out = []
    for one in records:
        seconds, nanos = divmod(one.time_nanos, 10**9)
        stamp = datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S")
        name = "stderr" if one.stream else "stdout"
        out.append(f"{stamp}.{nanos:09d}Z {name} {'P' if one.partial else 'F'} ".encode() + one.line + b"\n")
    return b"".join(out)


class Source:
    """The agent's side: returns the records after a cursor that exist so far, and follows the log."""

    def __init__(self, records: list[Any]) -> None:
        self.records = records
        self.available = 0
        self.ended = False
        self.asked: list[str] = []
        self.text = 0  # the most records that come as one, with their text; 0: each comes as it is
        self._waiting: list[Deferred[None]] = []

    async def read(self, cursor: str) -> AsyncGenerator[vmserver.LogRecord, None]:
        self.asked.append(cursor)
        at = int(cursor or 0)
        while True:
            while at < self.available:
                many = self.records[at : min(at + max(self.text, 1), self.available)]
                at += len(many)
                if self.text:
                    yield vmserver.LogRecord(text=expected(many), cursor=str(at))
                else:
                    yield many[0]
            if self.ended and at == len(self.records):
                return
            waiting: Deferred[None] = Deferred()
            self._waiting.append(waiting)
            await waiting

    def emit(self, count: int) -> None:
        self.available = min(self.available + count, len(self.records))
        self._wake(lambda d: d.callback(None))

    def end(self) -> None:
        self.available, self.ended = len(self.records), True
        self._wake(lambda d: d.callback(None))

    def lose(self) -> None:
        """Lose the connection."""
        self._wake(lambda d: d.errback(Unavailable("connection lost")))

    def _wake(self, how: Callable[[Any], None]) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.called:
                how(one)


class Killed(BaseException):
    """Raised where the process is killed."""


class Fuse:
    """Kill the process during the `left`-th effect from now on, after that share of the effect."""

    def __init__(self) -> None:
        self.left, self.share, self.dead = -1, 0.0, False

    def effect(self, whole: Callable[[], Any], part: Callable[[float], Any]) -> Any:
        if self.dead:
            raise Killed
        if self.left == 0:
            self.dead = True
            part(self.share)
            raise Killed
        self.left -= 1
        return whole()


class MortalFiles(LogFiles):
    """The real thing, in a process that may be killed. `full`: the disk is full."""

    def __init__(self, fuse: Fuse) -> None:
        self.fuse = fuse
        self.full = False

    def append(self, path: Path, inode: int, data: bytes) -> int:
        if self.full and not self.fuse.dead:
            raise OSError(errno.ENOSPC, "No space left on device")

        def part(share: float) -> None:
            super(MortalFiles, self).append(path, inode, data[: int(share * len(data))])

        return int(self.fuse.effect(lambda: super(MortalFiles, self).append(path, inode, data), part))

    def current(self, path: Path) -> Found:
        made = super().current
        found: Found = self.fuse.effect(
            lambda: made(path), lambda share: made(path) if share >= 0.5 else None
        )
        return found


class LogScenario:
    """One container's log, written by any number of daemons in turn."""

    def __init__(self, directory: Path, records: list[Any], lag: float = 0.0) -> None:
        self.lag = lag  # seconds for work to start in a thread, and for its result to be known
        self.path = directory / "pod" / "0.log"
        self.source = Source(records)
        self.clock = Clock()
        self.checkpoint: Checkpoint | None = None
        self.rotated: list[Path] = []
        self.unreachable = False  # whether the agent is
        self.renamed = False  # whether kubelet has renamed the file and not yet had it reopened
        self.begin()

    def begin(self) -> None:
        """Start a daemon."""
        self.fuse = fuse = Fuse()  # belongs to this daemon
        self.files = MortalFiles(self.fuse)

        async def save(checkpoint: Checkpoint) -> None:
            def keep(share: float = 1.0) -> None:
                if share >= 0.5:
                    self.checkpoint = checkpoint

            fuse.effect(keep, keep)  # a daemon that was killed saves nothing more

        async def direct(reactor: object, work: Callable[[*Ts], T], *args: *Ts) -> T:
            async def take_time() -> None:
                if self.lag:
                    await deferLater(self.clock, self.lag)
                if fuse.dead:
                    raise Killed

            await take_time()
            result = work(*args)
            await take_time()
            return result

        async def read(cursor: str) -> AsyncGenerator[vmserver.LogRecord, None]:
            if fuse.dead:
                raise Killed
            if self.unreachable:
                raise Unavailable("no route to the agent")
            records: Any = self.source.read(cursor)
            try:
                async for one in records:
                    if fuse.dead:
                        raise Killed
                    yield one
            finally:
                await records.aclose()

        self.log = ContainerLog(
            cast(Any, self.clock), self.path, read, self.checkpoint, save, files=self.files, in_thread=direct
        )
        self.finished: list[Any] = []
        self.log.finished.addBoth(self.finished.append)
        self.log.start()

    def kill(self) -> None:
        self.fuse.dead = True

    def restart(self) -> None:
        self.kill()
        self.source.lose()
        self.begin()

    def rename(self) -> None:
        """Begin a rotation, as kubelet does."""
        if not self.renamed and self.path.exists():
            self.rotated.append(self.path.with_name(f"0.log.{len(self.rotated):04d}"))
            self.path.rename(self.rotated[-1])
            self.renamed = True

    def reopen(self) -> None:
        """Continue it: call ReopenContainerLog, and restore the old name if that fails."""
        done: list[Any] = []
        failed: list[Any] = []
        Deferred.fromCoroutine(self.log.reopen()).addCallbacks(done.append, failed.append)
        for _ in range(200):
            if done or failed or self.fuse.dead or not self.lag:
                break
            self.clock.advance(self.lag)
        if not self.renamed:
            return
        if not done:
            self.rotated.pop().rename(self.path)
        self.renamed = False

    def content(self) -> bytes:
        files = [*self.rotated, *([self.path] if self.path.exists() else [])]
        return b"".join(file.read_bytes() for file in files)

    def complete(self) -> None:
        """Have everything written by a daemon that is not killed."""
        self.unreachable = False
        self.restart()
        if self.renamed:
            self.reopen()
        self.source.end()
        for _ in range(20):
            self.clock.advance(10)
