# SPDX-License-Identifier: Apache-2.0
"""The steps between a container's phases, with their effects: see the tables in `record`.

The caller holds the container's lock, except for `stop`.
"""

from __future__ import annotations

import contextlib
import time

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes_common.concurrency import run_in_thread, settled, start, within
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, InfranetesError, InvalidArgument
from infranetes_common.reactors import IReactor
from vmserver.containers.oci import log
from vmserver.containers.oci import state as states
from vmserver.containers.oci.backlog import Backlog
from vmserver.containers.oci.bundle import Bundles
from vmserver.containers.oci.conmon import CannotRun, Conmon, Exit, Process, Watch
from vmserver.containers.oci.container import OciContainer
from vmserver.containers.oci.control import Control
from vmserver.containers.oci.filesystems import FileSystems
from vmserver.containers.oci.hold import Freezer
from vmserver.containers.oci.index import ContainerIndex, unwritable
from vmserver.containers.oci.record import Phase
from vmserver.containers.oci.rotation import Rotation
from vmserver.containers.oci.runtime import Crun
from vmserver.containers.oci.strays import kill_strays

STOP_SECONDS = 5.0  # for recording the containers' ends when the agent stops

_log = Logger()


class Lifecycle:
    """Takes the steps between phases."""

    def __init__(
        self,
        reactor: IReactor,
        index: ContainerIndex,
        crun: Crun,
        conmon: Conmon,
        files: FileSystems,
        bundles: Bundles,
        rotation: Rotation,
        freezer: Freezer,
    ) -> None:
        self._reactor = reactor
        self._index = index
        self._crun = crun
        self._conmon = conmon
        self._files = files
        self._bundles = bundles
        self._rotation = rotation
        self._freezer = freezer
        self._watches: dict[str, Watch] = {}
        self._ending: set[Deferred[None]] = set()

    async def stop(self) -> None:
        """Stop watching containers, and finish the work in progress. Idempotent."""
        for id in list(self._watches):
            self._watch_no_more(id)
        self._rotation.close()
        if self._ending:
            with contextlib.suppress(DeadlineExceeded):
                await within(self._reactor, STOP_SECONDS, settled(list(self._ending)), "ends of containers")

    # The start

    async def start(self, container: OciContainer) -> None:
        """Start a container that is CREATED, CREATING, GIVEN or STARTING.

        :raise InvalidArgument: its command can't be executed. :raise FailedPrecondition: it can't be started.
        """
        record = container.record
        if record.phase is Phase.CREATING:  # an earlier start failed, and so did its cleanup
            await self._undo(container)
        if record.phase is Phase.CREATED:
            process: Process | Exit | None = await self._make(container)
        else:
            process = self._conmon.find(container.monitored)
        if record.phase is Phase.GIVEN:
            states.starting(record, time.time_ns())
            await self._index.save(container)
        await self._let_go(container, process)

    async def _make(self, container: OciContainer) -> Process:
        """Create the container with conmon and crun, which leave it waiting for its start."""
        record = container.record
        record.phase = Phase.CREATING
        try:
            await self._index.save(container)
            spec = await self._bundles.prepare(container)
            process = await self._conmon.create(container.monitored)
            self._crun.filters.keep(spec, container.engine_id)
            states.starting(record, time.time_ns())
            await self._index.save(container)
        except CannotRun as error:
            raise await self._refused(container, error.exit_code, str(error)) from error
        except BaseException:
            record.phase = Phase.CREATING
            await self._undo(container)
            raise
        return process

    async def _let_go(self, container: OciContainer, process: Process | Exit | None) -> None:
        """Let its first process go on, unless an earlier agent has."""
        if isinstance(process, Process):
            try:
                status = self._crun.status(container.engine_id)
                if status is None or status.waiting:
                    await self._crun.start(container.engine_id)
                if container.engine_id != container.id:
                    await self._freezer.thaw([container.engine_id])
                if container.record.hook is not None:
                    await self._freezer.tell(container, container.record.hook)
            except InfranetesError as error:
                status = self._crun.status(container.engine_id)
                if status is None or status.waiting or status.alive:
                    raise await self._refused(container, states.START_ERROR, str(error)) from error
        await self._running(container, process)

    async def _running(self, container: OciContainer, process: Process | Exit | None) -> None:
        """Report that it runs, and watch it; or report how it has ended meanwhile."""
        if isinstance(process, Process):
            states.running(container.record, process.pid)
            await self._index.note(container)
            self._watch(container, process)
            self._index.notify(container)
        else:
            await self._ended(container, process)

    async def _refused(self, container: OciContainer, code: int, message: str) -> InfranetesError:
        """Report that it can't be started, clean up, and return the error to raise."""
        states.cannot_start(container.record, code, message, time.time_ns())
        await self._over(container)
        kind = InvalidArgument if container.record.state.reason == states.CANNOT_RUN else FailedPrecondition
        return kind(f"container {container.id} can't be started: {message}")

    async def _undo(self, container: OciContainer) -> None:
        """Make a container that has not run CREATED again."""
        await self._conmon.discard(container.monitored)
        states.not_started(container.record)
        await self._index.note(container)

    # The log

    async def begin_log(self, container: OciContainer) -> None:
        """Delete what a container has logged so far. conmon goes on with the same file."""
        container.reading = None
        if container.process is not None:
            self._watch(container, container.process)  # nothing of what was watched counts any more
        try:
            await run_in_thread(self._reactor, log.thd_clear, container.log)
        except OSError as error:
            raise unwritable(container.log, error) from error

    # The end

    def _watch(self, container: OciContainer, process: Process) -> None:
        self._watch_no_more(container.engine_id)
        container.process = process
        container.control = Control(self._reactor, container.bundle)
        backlog = Backlog(self._reactor, process, lambda: container.read_to, self._rotation.unread)
        self._rotation.add(container.engine_id, container.log, container.control, backlog)
        self._watches[container.engine_id] = self._conmon.watch(
            container.monitored, process, lambda exit: self._seen(container, exit)
        )

    def _watch_no_more(self, id: str) -> None:
        watch = self._watches.pop(id, None)
        self._rotation.remove(id)
        if watch is not None:
            watch.close()

    def _seen(self, container: OciContainer, exit: Exit) -> None:
        self._watch_no_more(container.engine_id)
        ending = start(self._note_end(container, exit))
        self._ending.add(ending)
        ending.addErrback(_failed, container.id).addBoth(lambda _: self._ending.discard(ending))

    async def _note_end(self, container: OciContainer, exit: Exit) -> None:
        async with container.lock:
            if container.record.phase is Phase.KEPT:
                await self.remove(container)
            elif container.exists:
                await self._ended(container, exit)

    async def _ended(self, container: OciContainer, exit: Exit | None) -> None:
        """Record and report the container's end. :param exit: None if nobody knows how it ended."""
        if exit is None:
            states.lost(container.record, time.time_ns())
        else:
            states.ended(container.record, exit)
        await self._over(container)

    async def _over(self, container: OciContainer) -> None:
        """Report its end and clean up."""
        noted = await self._index.note(container)
        self._index.notify(container)
        if noted:  # otherwise the next agent needs these files to find out that it ended
            await self._finish(container)

    async def _finish(self, container: OciContainer) -> None:
        """Clean up after a container that has ended. A failure is retried when the container is removed."""
        try:
            await self._clean(container)
        except InfranetesError as error:
            _log.warn("container {id} has ended and is not cleaned up: {error}", id=container.id, error=error)
            return
        container.record.phase = Phase.EXITED
        await self._index.note(container)

    async def _clean(self, container: OciContainer) -> None:
        await self._conmon.discard(container.monitored)
        await self._files.unmount(container)

    async def remove(self, container: OciContainer) -> None:
        """End and delete a container, whatever its phase is."""
        self._watch_no_more(container.engine_id)
        container.record.phase = Phase.REMOVING
        await self._index.note(container)  # a full disk must not prevent the removal, so only try
        await self._clean(container)
        await self._files.delete(container.directory)
        self._index.remove(container)

    # The agent's start

    async def recover(self, container: OciContainer) -> None:
        """Bring a container of an earlier agent to a stable phase, and watch it if it runs."""
        phase = container.record.phase
        if phase is Phase.CREATING:
            await run_in_thread(self._reactor, kill_strays, container.engine_id)
            await self._undo(container)
        elif phase is Phase.STARTING:
            await self._let_go(container, self._conmon.find(container.monitored))
        elif phase is Phase.RUNNING:
            await self._running(container, self._conmon.find(container.monitored))
        elif phase in (Phase.KEPT, Phase.GIVEN):
            await self._still(container, self._conmon.find(container.monitored))
        elif phase is Phase.ENDED:
            await self._finish(container)
        elif phase is Phase.REMOVING:
            await self.remove(container)

    async def _still(self, container: OciContainer, process: Process | Exit | None) -> None:
        """Watch a container that is held; or note that it has ended meanwhile."""
        if isinstance(process, Process):
            await self._freezer.freeze([container.engine_id])
            self._watch(container, process)
        elif container.record.phase is Phase.KEPT:
            await self.remove(container)
        else:
            await self._ended(container, process)


def _failed(failure: Failure, id: str) -> None:
    if not failure.check(CancelledError):
        _log.failure("the end of container {id} could not be recorded", failure, id=id)
