# SPDX-License-Identifier: Apache-2.0
"""A container in this process: its record, its directory, a lock, and its end."""

from __future__ import annotations

from pathlib import Path

from twisted.internet.defer import Deferred, DeferredLock, succeed

from infranetes_common.concurrency import Event, Flight, deferred
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from vmserver.containers.oci.conmon import Monitored, Process
from vmserver.containers.oci.control import Control
from vmserver.containers.oci.log import CriLog, Cursor
from vmserver.containers.oci.record import OciRecord, Phase


class OciContainer:
    """A container that conmon and crun run.

    :ivar lock: held while its phase changes.
    :ivar starting: its start, while that goes on.
    :ivar directory: all of its files.
    :ivar reading: the node's last reader of its log, which may have gone.
    :ivar quiet: it is of a pod that was kept: not listed, and nobody is told of it.
    :ivar process: its first process and its conmon, once it runs. :ivar control: of that conmon.
    """

    def __init__(self, record: OciRecord, directory: Path) -> None:
        self.record = record
        self.directory = directory
        self.lock = DeferredLock()
        self.starting: Flight[messages.ContainerState] | None = None
        self.process: Process | None = None
        self.control: Control | None = None
        self.reading: CriLog | None = None
        self.removed = False
        self.quiet = record.phase is Phase.KEPT
        self._over: Event[None] = Event()

    @property
    def id(self) -> str:
        """Its id."""
        return self.record.state.id

    @property
    def engine_id(self) -> str:
        """The id by which crun and conmon know it: the one that it was created with."""
        return self.record.engine_id

    @property
    def bundle(self) -> Path:
        """The OCI bundle: config.json and the directory `rootfs`."""
        return self.directory / "bundle"

    @property
    def root(self) -> Path:
        """The mount point of its root file system."""
        return self.bundle / "rootfs"

    @property
    def written(self) -> Path:
        """The upper directory of its root file system: the files it wrote over its image."""
        return self.directory / "upper"

    @property
    def monitored(self) -> Monitored:
        """The container's description for conmon."""
        config = self.record.config
        return Monitored(self.engine_id, self.bundle, self.log, config.tty, config.stdin, config.stdin_once)

    @property
    def log(self) -> Path:
        """Its log, in the CRI's format."""
        return self.directory / "log"

    @property
    def read_to(self) -> Cursor | None:
        """How far the node has read its log; None: not at all, as far as this agent knows."""
        return None if self.reading is None else self.reading.position

    @property
    def over(self) -> bool:
        """True if it has ended or been removed."""
        return self.removed or self.record.state.state == cri.CONTAINER_EXITED

    @property
    def exists(self) -> bool:
        """Whether its first process exists, running or held, as far as the agent knows."""
        return self.record.phase in (Phase.RUNNING, Phase.KEPT, Phase.GIVEN)

    @property
    def running(self) -> bool:
        """True if its first process runs, as far as the agent knows."""
        return self.record.phase is Phase.RUNNING

    def state(self) -> messages.ContainerState:
        """Return a copy of its state."""
        state = messages.ContainerState()
        state.CopyFrom(self.record.state)
        return state

    def when_over(self) -> Deferred[None]:
        """Fire once the container has ended or is removed."""
        return succeed(None) if self.over else self._over.wait()

    @deferred
    async def exit_code(self) -> int:
        """Return its exit code, once it has ended."""
        await self.when_over()
        return self.record.state.exit_code

    def notify(self) -> None:
        """Wake the waiters for the container's end if it has ended. Called after each change of state."""
        if self.over:
            self._over.succeed(None)
