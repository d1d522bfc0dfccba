# SPDX-License-Identifier: Apache-2.0
"""The containers' log files, each written from the container's start until it has all of the output."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path

import attrs
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.logs import Checkpoint, ContainerLog, make_file, stop_all
from infranetes.pods.node.inventory import Container
from infranetes.pods.store.records import LogPosition
from infranetes.pods.store.states import ContainerState
from infranetes.pods.store.store import Store
from infranetes_common.concurrency import Event, Flight, start, within
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.reactors import IReactor
from infranetes_common.wire import vmserver

_MESSAGE_POLICY = "io.kubernetes.container.terminationMessagePolicy"  # kubelet's annotation
_FALLBACK = "FallbackToLogsOnError"  # the end of the log is the termination message
LONGEST_SECONDS = 300.0  # that a log which advances is waited for, where no caller says how long
OPEN_SECONDS = 5.0  # the longest that a start waits for the log file

_log = Logger()


def log_file(container: Container) -> Path | None:
    """Return the path of the container's log file, or None if it has no log.

    :raise InvalidArgument: the path is not below the sandbox's log directory."""
    directory, path = container.sandbox.config.log_directory, container.config.log_path
    if not directory or not path:
        return None
    if not directory.startswith("/") or path.startswith("/") or ".." in path.split("/"):
        raise InvalidArgument(f"container {container.id}: its log_path leads out of the log directory")
    return Path(directory) / path


class Logs:
    """Writes the output of every container that has a log path into its file."""

    def __init__(self, reactor: IReactor, store: Store) -> None:
        self._reactor = reactor
        self._store = store

    def ensure(self, container: Container) -> None:
        """Start writing the log, unless the log is complete, the container has none, or there is no VM to
        read it from. Idempotent."""
        position = container.log_position
        if container.pump is not None or container.sandbox.client is None:
            return
        path = log_file(container)
        if path is not None and (position is None or not position.done):
            container.pump = Pump(self._reactor, self._store, container, path)

    async def prepare(self, container: Container) -> None:
        """Make the log file of a container that has not run yet.

        A full disk, and one that does not answer, hold up no container: the file is tried again when it runs.

        :raise FailedPrecondition: there can be no file at its path."""
        path = log_file(container)
        if path is None:
            return
        with contextlib.suppress(DeadlineExceeded, ResourceExhausted):
            making = start(make_file(self._reactor, path))
            await within(self._reactor, OPEN_SECONDS, making, "the log file")

    async def wait_until_open(self, container: Container) -> None:
        """Wait until the log file exists: the client that started the container looks for it at once.

        If the file can't be made, log that and return: the container runs, and the file is tried again."""
        pump = container.pump
        if pump is None:
            return
        try:
            await within(self._reactor, OPEN_SECONDS, start(pump.log.open()), "the log file")
        except Exception as error:
            _log.warn(
                "container {container} runs, its log is not there yet: {error}",
                container=container.id,
                error=error,
            )

    def drain(self, container: Container) -> Deferred[None]:
        """Fire when the file has everything that an ended container wrote; at once if it has no log."""
        if container.state is ContainerState.EXITED:
            self.ensure(container)
        pump = container.pump
        return pump.ended.wait() if pump is not None else succeed(None)

    async def reopen(self, container: Container) -> None:
        """Continue the log in a new file at its path.

        :raise FailedPrecondition: there is no log, or the file can't be made.
        :raise ResourceExhausted: there is no room for the file; the log continues in the old one."""
        if container.pump is None:
            raise FailedPrecondition(f"container {container.id} has no log: no log_path was given")
        await container.pump.log.reopen()

    def abort(self, container: Container, why: str) -> bool:
        """Stop writing the log, because no more output will come. The file keeps what it has, and says why.

        :return: whether something may be missing."""
        return container.pump is not None and container.pump.abort(why)

    async def stop(self, containers: Iterable[Container]) -> None:
        """Stop writing these containers' logs, and save the positions where a later daemon continues."""
        await stop_all(
            self._reactor, [container.pump.log for container in containers if container.pump is not None]
        )


def _only_ends_a_line(record: vmserver.LogRecord) -> bool:
    """Return whether it only says that no more comes to a last line, for those who wait for its rest.

    kubelet takes it for a newline, which is no part of a termination message. Agents send all else as text.
    """
    return not (record.HasField("text") or record.line or record.partial or record.gap)


class Pump:
    """The writer of one container's log.

    :ivar ended: happens when the file has everything that the container wrote, or no more will come.
    """

    def __init__(self, reactor: IReactor, store: Store, container: Container, path: Path) -> None:
        self.ended: Event[None] = Event()
        self._aborting = False
        self._store = store
        self._container = container
        position = container.log_position
        checkpoint = None if position is None else Checkpoint(position.cursor, position.inode, position.size)
        self.log = ContainerLog(reactor, path, self._read, checkpoint, self._save)
        self.log.start()
        self.log.finished.addCallbacks(lambda _: self._finish(), self._fail)

    async def _read(self, cursor: str) -> AsyncGenerator[vmserver.LogRecord, None]:
        client = self._container.sandbox.client
        if client is None:
            raise Unavailable(f"sandbox {self._container.record.sandbox_id} has no agent")
        as_message = self._container.config.annotations.get(_MESSAGE_POLICY) == _FALLBACK
        records = client.read_log(self._container.id, cursor, follow=True)
        try:
            async for record in records:
                if not (as_message and _only_ends_a_line(record)):
                    yield record
        finally:
            await records.aclose()

    async def _save(self, checkpoint: Checkpoint) -> None:
        position = LogPosition(checkpoint.cursor, checkpoint.inode, checkpoint.size)
        await self._store.put_log(self._container.id, position)
        self._container.log_position = position

    def say(self, text: str) -> None:
        """Append a line of our own to the log, in the background."""
        writing = start(self.log.say(text))
        writing.addErrback(
            lambda failure: _log.error(
                "the log of container {container} does not say that {text}: {error}",
                container=self._container.id,
                text=text,
                error=failure.value,
            )
        )

    def abort(self, why: str) -> bool:
        """See `Logs.abort`."""
        if self.ended.happened or self._aborting:
            return False
        self._aborting = True
        stopped = start(self.log.cut(why))
        stopped.addErrback(
            lambda failure: _log.error(
                "the log of container {container} did not end cleanly: {error}",
                container=self._container.id,
                error=failure.value,
            )
        )
        stopped.addCallback(lambda _: self._finish())
        return True

    def _finish(self) -> None:
        """Record that the log is complete, or that it never will be."""
        if self.ended.happened:
            return
        before = self._container.log_position or LogPosition("", 0, 0)
        position = self._container.log_position = attrs.evolve(before, done=True)
        saved = self._store.put_log(self._container.id, position)
        saved.addErrback(
            lambda failure: _log.error(
                "the end of the log of container {container} was not recorded: {error}",
                container=self._container.id,
                error=failure.value,
            )
        )
        self.ended.succeed(None)

    def _fail(self, failure: Failure) -> None:
        _log.error(
            "the log of container {container} can't be continued: {error}",
            container=self._container.id,
            error=failure.value,
        )
        self._finish()


async def wait_while_advancing(
    clock: IReactorTime,
    container: Container,
    work: Deferred[None],
    stalled: float,
    until: Callable[[], float] | None = None,
) -> None:
    """Wait for `work` for some seconds, and then on as long as the container's log advances.

    :param stalled: how long to wait for anything new.
    :param until: returns the time after which this gives up even so; None: LONGEST_SECONDS from now.
    :raise DeadlineExceeded: it has given up. `work` is then cancelled.
    """
    longest = clock.seconds() + LONGEST_SECONDS
    patience = stalled
    flight = Flight(work)
    try:
        while True:
            before = container.pump and container.pump.log.progress
            try:
                return await within(clock, patience, flight.join(), "the rest of the log")
            except DeadlineExceeded:
                patience = min(stalled, (until() if until is not None else longest) - clock.seconds())
                if patience <= 0 or before == (container.pump and container.pump.log.progress):
                    raise
    finally:
        flight.cancel()
