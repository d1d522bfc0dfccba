"""The containers' log files: each one's pump, from its start until all that it wrote is in the file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.logger import Logger

from infranetes.pods.inventory import Container
from infranetes.pods.states import ContainerState
from infranetes_common.errors import FailedPrecondition, InvalidArgument

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
        """See to it that the log is being written. Complete, or none to be kept: nothing to do."""
        position = container.log_position
        path = log_path(container)
        if container.pump is not None or path is None or (position is not None and position.done):
            return
        return

    def drain(self, container: Container) -> Deferred[None]:
        """Fires when all that an ended container wrote is in its file; at once where no log is kept."""
        if container.state is ContainerState.EXITED:
            self.ensure(container)
        pump = container.pump
        return pump.wait() if pump is not None else succeed(None)

    async def reopen(self, container: Container) -> None:
        """Go on in a new file at the log's path."""
        if container.pump is None:
            raise FailedPrecondition(f"container {container.id} has no log: no log_path was given")
        await container.pump.log.reopen()

    def abort(self, container: Container) -> None:
        """Nothing more will come. What is in the file stays."""
        if container.pump is not None:
            container.pump.abort()

    async def stop(self, containers: Iterable[Container]) -> None:
        """Leave off, with each log's position kept, for a later daemon to go on."""
        for container in containers:
            if container.pump is not None:
                await container.pump.leave_off()
