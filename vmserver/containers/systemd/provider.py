# SPDX-License-Identifier: Apache-2.0
"""The provider of the package: it changes the containers that `index` has."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from pathlib import Path

from twisted.internet.defer import Deferred, TimeoutError, succeed
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.logger import Logger
from zope.interface import implementer

from infranetes_common.concurrency import deferred, run_in_thread, sleep, start
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from infranetes_common.processes import oom_score_adj
from infranetes_common.reactors import IReactor
from infranetes_common.systemd_bus import CONNECT_SECONDS
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from vmserver.containers.child_exec import exec_sync
from vmserver.containers.child_sessions import ExecSession
from vmserver.containers.exec_limits import check_executable
from vmserver.containers.interface import (
    Changed,
    ExecResult,
    IContainerProvider,
    IImageFetcher,
    ISession,
    Removed,
    Streams,
)
from vmserver.containers.journal import Journal
from vmserver.containers.records import Record
from vmserver.containers.resources import merge
from vmserver.containers.systemd import logs, units
from vmserver.containers.systemd import state as states
from vmserver.containers.systemd.config import SystemdConfig
from vmserver.containers.systemd.container import UnitContainer
from vmserver.containers.systemd.enter import entering
from vmserver.containers.systemd.images import Executables
from vmserver.containers.systemd.index import UnitIndex
from vmserver.containers.systemd.manager import RETRY_SECONDS
from vmserver.containers.systemd.programs import NOT_EXECUTABLE, CannotRun, Located, locate
from vmserver.containers.systemd.sessions import UnitAttachSession
from vmserver.containers.systemd.starting import start_units
from vmserver.stats import container as stats

START_SECONDS = 120.0

_log = Logger()


@implementer(IContainerProvider, IImageFetcher)
class SystemdProvider:
    """An `IContainerProvider` whose containers are units of systemd.

    :param directory: for the records; created when it is first needed.
    :param endpoint: how to reach systemd; by default the configured socket.
    :param own_pid: translates a pid as systemd numbers it to that in the agent's own PID namespace.
    """

    name = "systemd"

    def __init__(
        self,
        reactor: IReactor,
        config: SystemdConfig,
        directory: Path,
        endpoint: IStreamClientEndpoint | None = None,
        own_pid: Callable[[int], int] = lambda pid: pid,
    ) -> None:
        self._reactor = reactor
        self._config = config
        self._directory = directory
        self._own_pid = own_pid
        self._journal = Journal(reactor, config.journalctl, config.journal_dir)
        self._images = Executables(reactor, config)
        if endpoint is None:
            endpoint = UNIXClientEndpoint(reactor, str(config.socket), CONNECT_SECONDS)
        self._index = UnitIndex(reactor, endpoint, directory, self._journal, self._locate, own_pid)
        self._systemd = self._index.systemd

    # Starting and stopping

    @deferred
    async def start(self) -> None:
        self._index.load()
        self._images.start()
        await self._systemd.start()

    @deferred
    async def stop(self) -> None:
        self._index.stop()

    def watch(self, changed: Changed, removed: Removed) -> None:
        self._index.watch(changed, removed)

    def configure(self, sandbox_config: cri.PodSandboxConfig) -> Deferred[None]:
        return succeed(None)

    # Containers

    @deferred
    async def create(
        self, id: str, image_id: str, config: cri.ContainerConfig, sandbox_config: cri.PodSandboxConfig
    ) -> messages.ContainerState:
        container = self._index.get(id)
        if container is None:
            if not self._images.has(image_id):
                raise FailedPrecondition(f"image {image_id} is not loaded; load it first")
            units.check(config, os.path.exists)
            state = messages.ContainerState(
                id=id, state=cri.CONTAINER_CREATED, created_at=time.time_ns(), image_id=image_id
            )
            state.resources.CopyFrom(config.linux.resources)
            container = self._index.add(Record(state, config, log=f"{id}.{secrets.token_hex(8)}"))
        return container.state()

    @deferred
    async def start_container(self, id: str) -> messages.ContainerState:
        container = self._index.existing(id)
        async with container.lock:
            if container.record.state.state == cri.CONTAINER_CREATED:
                await self._start_units(container)
                state = container.record.state
                if state.state == cri.CONTAINER_EXITED and state.reason in (states.CANNOT_RUN, "StartError"):
                    kind = InvalidArgument if state.reason == states.CANNOT_RUN else FailedPrecondition
                    raise kind(f"container {id} can't be started: {state.message}")
                return container.state()
        if container.removed:
            raise NotFound(f"there is no container {id} in this sandbox's VM")
        if container.record.state.state == cri.CONTAINER_EXITED:
            reason = container.record.state.reason
            raise FailedPrecondition(f"container {id} has ended ({reason}); make another one")
        return container.state()

    def _locate(self, record: Record) -> Located | CannotRun:
        config = record.config
        command = units.argv(config, self._images.path(record.state.image_id))
        environment = units.environment(config)
        try:
            check_executable(command, [f"{name}={value}" for name, value in environment.items()])
        except InvalidArgument as error:
            return CannotRun(NOT_EXECUTABLE, str(error))
        return locate(command, environment, config.working_dir, config.mounts)

    async def _start_units(self, container: UnitContainer) -> None:
        """Start the units unless an earlier agent has, and wait until the container runs or has ended."""
        await self._index.refresh_locked(container)
        state = container.record.state
        if state.state != cri.CONTAINER_CREATED:
            return
        located = self._locate(container.record)
        if isinstance(located, CannotRun):
            states.cannot_run(state, located.code, located.message, time.time_ns())
            state.finished_at = state.started_at
            self._index.changed(container)
            return
        await start_units(self._systemd, self._directory, container.record, located, self._config.tasks_max)
        deadline = self._reactor.seconds() + START_SECONDS
        while container.record.state.state == cri.CONTAINER_CREATED:
            if self._reactor.seconds() > deadline:
                raise Unavailable(
                    f"systemd did not start container {state.id} within {START_SECONDS:g} s; try again"
                )
            await sleep(self._reactor, 0.01)
            await self._index.refresh_locked(container)

    @deferred
    async def stop_container(self, id: str, grace_seconds: int) -> messages.ContainerState:
        container = self._index.existing(id)
        if container.record.state.state == cri.CONTAINER_RUNNING:
            unit = units.unit_name(id)
            over = container.when_over()
            if grace_seconds:
                await self._systemd.call(
                    "KillUnit", "ssi", (unit, "main", units.stop_signal(container.record.config))
                )
                over.addTimeout(grace_seconds, self._reactor)
                with contextlib.suppress(TimeoutError):
                    await over
            if not container.over:
                await self._kill(unit)
                ending = container.when_over()
                ending.addTimeout(START_SECONDS, self._reactor)
                await self._index.refresh(container)
                try:
                    await ending
                except TimeoutError:
                    raise Unavailable(f"container {id} does not end, though it was killed") from None
        return container.state()

    async def _kill(self, unit: str) -> None:
        """Kill all processes, or only the main one if systemd fails because another is starting or ending."""
        try:
            await self._systemd.call("KillUnit", "ssi", (unit, "all", int(signal.SIGKILL)))
        except Unavailable as error:
            _log.info("{unit}: {error}", unit=unit, error=error)
            await self._systemd.call("KillUnit", "ssi", (unit, "main", int(signal.SIGKILL)))

    @deferred
    async def remove(self, id: str) -> None:
        container = self._index.get(id)
        if container is None:
            return
        await self._index.refresh(container)
        if container.record.state.state == cri.CONTAINER_RUNNING:
            await self.stop_container(id, 0)
        async with container.lock:
            if container.removed:
                return
            await self._systemd.discard(units.unit_name(id))
            self._index.remove(container)
        self._index.notify_removed(container)

    @deferred
    async def update(self, id: str, resources: cri.LinuxContainerResources) -> messages.ContainerState:
        container = self._index.existing(id)
        merged = cri.LinuxContainerResources()
        merged.CopyFrom(container.record.state.resources)
        merge(merged, resources)
        limits = units.limits(merged)
        if container.record.state.state == cri.CONTAINER_RUNNING and limits:
            await self._systemd.set_limits(units.unit_name(id), limits)
        async with container.lock:
            if container.record.state.resources != merged:
                container.record.state.resources.CopyFrom(merged)
                container.record.config.linux.resources.CopyFrom(merged)
                self._index.changed(container)
        return container.state()

    @deferred
    async def containers(self) -> list[messages.ContainerState]:
        self._systemd.connection()  # fails without a connection: the index would be out of date
        return [container.state() for container in self._index.all()]

    @deferred
    async def usage(self) -> list[messages.ContainerUsage]:
        containers = [(each.state(), self._own_pid(each.record.state.pid)) for each in self._index.all()]
        return await run_in_thread(self._reactor, _thd_measure, containers)

    # Commands and streams

    @deferred
    async def exec_sync(self, id: str, command: Sequence[str], timeout: float, max_output: int) -> ExecResult:
        entered, env, score = self._entering(id, command)
        return await exec_sync(self._reactor, entered, env, "/", score, timeout, max_output)

    def _entering(self, id: str, command: Sequence[str]) -> tuple[list[str], dict[str, str], int]:
        container = self._index.running(id)
        config = container.record.config
        try:
            pid = self._own_pid(container.record.state.pid)
            return entering(pid, config, command), units.environment(config), oom_score_adj(pid)
        except ProcessLookupError:
            raise FailedPrecondition(f"container {id} has just ended") from None

    @deferred
    async def exec_session(self, id: str, command: Sequence[str], streams: Streams) -> ISession:
        entered, env, score = self._entering(id, command)
        session: ISession = ExecSession.spawn(self._reactor, entered, env, "/", score, streams)
        return session

    @deferred
    async def attach_session(self, id: str, streams: Streams) -> ISession:
        container = self._index.running(id)
        record, config = container.record, container.record.config
        now = time.time_ns()
        session: ISession = UnitAttachSession(
            self._reactor,
            logs.records(self._reactor, self._journal, record.log, "", True, container.when_over(), now),
            now,
            streams,
            self._directory / f"{id}.stdin" if config.stdin else None,
            lambda: record.state.exit_code,
            (lambda: self._end_stdin(container)) if config.stdin_once else (lambda: None),
        )
        return session

    def _end_stdin(self, container: UnitContainer) -> None:
        ending = start(self._have_logger_close_stdin(container.record.logger))
        ending.addErrback(
            lambda failure: _log.error(
                "the container's stdin could not be closed: {error}", error=failure.value
            )
        )

    async def _have_logger_close_stdin(self, unit: str) -> None:
        deadline = self._reactor.seconds() + START_SECONDS
        while (found := await self._systemd.properties(unit)) is not None:
            if found[0].active_state != "activating":  # its signal handlers are installed
                await self._systemd.call("KillUnit", "ssi", (unit, "main", int(signal.SIGUSR1)))
                return
            if self._reactor.seconds() > deadline:
                raise Unavailable(f"{unit} did not start within {START_SECONDS:g} s")
            await sleep(self._reactor, RETRY_SECONDS[0])

    async def read_log(
        self, id: str, cursor: str, follow: bool, text: bool = False
    ) -> AsyncGenerator[messages.LogRecord, None]:
        container = self._index.existing(id)
        finished = container.when_over()
        reading = logs.records(
            self._reactor, self._journal, container.record.log, cursor, follow, finished, text=text
        )
        try:
            async for record in reading:
                yield record
        finally:
            await reading.aclose()

    # Images

    def missing_layers(self, diff_ids: Sequence[str]) -> Deferred[int]:
        return succeed(len(diff_ids))

    @deferred
    async def load_image(self, image_id: str, archive: AsyncIterator[bytes]) -> None:
        if self._images.has(image_id):
            async for _ in archive:
                pass
            return
        await self._images.store(image_id, archive)

    def fetch_image(self, image_id: str, url: str) -> Deferred[None]:
        return start(self._images.fetch(image_id, url))

    def images(self) -> Deferred[list[str]]:
        return succeed(self._images.list())

    @deferred
    async def remove_image(self, image_id: str) -> None:
        if any(container.record.state.image_id == image_id for container in self._index.all()):
            raise FailedPrecondition(f"image {image_id} is in use; remove its containers first")
        await self._images.remove(image_id)


def _thd_measure(
    containers: Sequence[tuple[messages.ContainerState, int]],
) -> list[messages.ContainerUsage]:
    found = []
    for state, pid in containers:
        usage = None
        if state.state == cri.CONTAINER_RUNNING and pid:
            usage = stats.usage(
                pid, max(state.resources.memory_limit_in_bytes, 0), units.UNIT_PREFIX + state.id
            )
        found.append(messages.ContainerUsage(id=state.id, started_at=state.started_at, usage=usage))
    return found
