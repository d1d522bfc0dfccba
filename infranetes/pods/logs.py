"""The containers' log files: each one's pump, from its start until all that it wrote is in the file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred, succeed
from twisted.logger import Logger

from infranetes.logs import Checkpoint, ContainerLog, stop_all
from infranetes.pods.inventory import Container
from infranetes.pods.records import LogPosition
from infranetes.pods.states import ContainerState
from infranetes.pods.waits import Signal, go, within
from infranetes_common.errors import FailedPrecondition, InvalidArgument, Unavailable

OPEN_SECONDS = 5.0  # that a start waits for the log's file

_log = Logger()


def log_path(container: Container) -> Path | None:
    """Where the container's log belongs; None: none is kept.

    :raise InvalidArgument: not below the sandbox's log directory."""
    directory, path = container.sandbox.config.log_directory, container.config.log_path
    if not directory or not path:
        return None
    if not directory.startswith("/") or path.startswith("/") or ".." in path.split("/"):
        raise InvalidArgument(f"container {container.id}: its log_path leads out of the log directory")
    return Path(directory) / path


class Logs:
    """Pumps the output of every container that has a log path into its file."""

    def __init__(self, reactor: Any, store: Any) -> None:
        self._reactor = reactor
        self._store = store

    def ensure(self, container: Container) -> None:
        """See to it that the log is being written. Complete, none to be kept, or no VM to read it from:
        nothing to do."""
        position = container.log_position
        if container.pump is not None or container.sandbox.client is None:
            return
        path = log_path(container)
        if path is not None and (position is None or not position.done):
            container.pump = Pump(self._reactor, self._store, container, path)

    async def opened(self, container: Container) -> None:
        """Wait for the log's file to be there: who started the container looks for it at once. Where it
        can't be had the container runs all the same, and the file is tried for again and again."""
        pump: Pump | None = container.pump
        if pump is None:
            return
        try:
            await within(self._reactor, OPEN_SECONDS, go(pump.log.open()), "the log's file")
        except Exception as error:
            _log.warn(
                "container {container} runs, its log is not there yet: {error}",
                container=container.id,
                error=error,
            )

    def drain(self, container: Container) -> Deferred[None]:
        """Fires when all that an ended container wrote is in its file; at once where no log is kept."""
        if container.state is ContainerState.EXITED:
            self.ensure(container)
        pump: Pump | None = container.pump
        return pump.over.wait() if pump is not None else succeed(None)

    async def reopen(self, container: Container) -> None:
        """Go on in a new file at the log's path.

        :raise FailedPrecondition: there is no log, or the file can't be made.
        :raise ResourceExhausted: no room for the file; writing goes on in the old one."""
        if container.pump is None:
            raise FailedPrecondition(f"container {container.id} has no log: no log_path was given")
        await container.pump.log.reopen()

    def abort(self, container: Container) -> None:
        """Nothing more will come. What is in the file stays."""
        if container.pump is not None:
            container.pump.abort()

    async def stop(self, containers: Iterable[Container]) -> None:
        """Leave off, with each log's position kept, for a later daemon to go on."""
        await stop_all(self._reactor, [one.pump.log for one in containers if one.pump is not None])


class Pump:
    """Writes one container's log.

    :ivar over: all that it wrote is in the file, or nothing more will come.
    """

    def __init__(self, reactor: Any, store: Any, container: Container, path: Path) -> None:
        self.over = Signal()
        self._store = store
        self._container = container
        position = container.log_position
        checkpoint = None if position is None else Checkpoint(position.cursor, position.inode, position.size)
        self.log = ContainerLog(reactor, path, self._read, checkpoint, self._save)
        self.log.start()
        self.log.finished.addCallbacks(lambda _: self._finish(), self._fail)

    async def _read(self, cursor: str) -> AsyncIterator[Any]:
        client = self._container.sandbox.client
        if client is None:
            raise Unavailable(f"sandbox {self._container.record.sandbox_id} has no agent")
        records: Any = client.read_log(self._container.id, cursor, follow=True)
        try:
            async for record in records:
                yield record
        finally:
            await records.aclose()

    async def _save(self, checkpoint: Checkpoint) -> None:
        position = LogPosition(checkpoint.cursor, checkpoint.inode, checkpoint.size)
        await self._store.put_log(self._container.id, position)
        self._container.log_position = position

    def abort(self) -> None:
        """See `Logs.abort`."""
        if self.over.fired:
            return
        stopped = go(self.log.stop())
        stopped.addErrback(
            lambda failure: _log.error(
                "the log of container {container} did not end cleanly: {error}",
                container=self._container.id,
                error=failure.value,
            )
        )
        stopped.addCallback(lambda _: self._finish())

    def _finish(self) -> None:
        """Never to be read again."""
        if self.over.fired:
            return
        before = self._container.log_position or LogPosition("", 0, 0)
        position = self._container.log_position = attrs.evolve(before, done=True)
        kept = self._store.put_log(self._container.id, position)
        kept.addErrback(
            lambda failure: _log.error(
                "the end of the log of container {container} was not recorded: {error}",
                container=self._container.id,
                error=failure.value,
            )
        )
        self.over.fire()

    def _fail(self, failure: Any) -> None:
        _log.error(
            "the log of container {container} can't go on: {error}",
            container=self._container.id,
            error=failure.value,
        )
        self._finish()
