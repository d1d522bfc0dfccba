# SPDX-License-Identifier: Apache-2.0
"""The provider of the package's one container, whose state is a file on the VM's disk.

A VM that reboots is still the same running container.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path

import attrs
from twisted.internet.defer import Deferred, DeferredLock, fail, succeed
from twisted.logger import Logger
from zope.interface import implementer

from infranetes_common.commands import PATH, Command, check
from infranetes_common.concurrency import Event, deferred
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument, NotFound
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from vmserver.containers import records
from vmserver.containers.child_exec import exec_sync
from vmserver.containers.child_sessions import AttachSession, ExecSession
from vmserver.containers.interface import (
    Changed,
    ExecResult,
    IContainerProvider,
    ISession,
    Removed,
    Streams,
)
from vmserver.containers.journal import Journal
from vmserver.containers.machine import log as logs
from vmserver.containers.machine import mounts
from vmserver.containers.records import Record
from vmserver.containers.resources import check_not_negative, merge
from vmserver.stats import machine as stats

_POWER_OFF_SECONDS = 60.0  # for systemctl, which does not wait for the VM's end
_log = Logger()


@attrs.frozen
class MachineConfig:
    """`[providers.machine]` of the agent's configuration."""

    state_dir: Path = Path("/var/lib/vmserver/machine")  # kept over reboots
    journalctl: str = "journalctl"  # the program
    journal_dir: Path | None = None  # the journal's files; by default the VM's own journal
    stop_command: tuple[str, ...] = ("systemctl", "--no-block", "poweroff")
    kill_command: tuple[str, ...] = (
        "systemctl",
        "--no-block",
        "--force",
        "poweroff",
    )  # powers off without a grace period


@implementer(IContainerProvider)
class MachineProvider:
    """An `IContainerProvider` of one container: the VM."""

    name = "machine"

    def __init__(self, reactor: IReactor, config: MachineConfig) -> None:
        self._reactor = reactor
        self._config = config
        self._journal = Journal(reactor, config.journalctl, config.journal_dir)
        self._lock = DeferredLock()
        self._record: Record | None = None
        self._ended: Event[None] = Event()  # the end of the present container
        self._watchers: list[tuple[Changed, Removed]] = []

    # Starting and stopping

    @deferred
    async def start(self) -> None:
        async with self._lock:
            await self._start()

    async def _start(self) -> None:
        directory = self._config.state_dir
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = records.load(directory)
        except (OSError, ValueError) as error:
            raise FailedPrecondition(f"the state directory {directory} can't be used: {error}") from error
        if found and self._record is None:
            self._record = found[0]
            if self._record.state.state == cri.CONTAINER_EXITED:
                self._ended.succeed(None)
        # The VM may have been rebooted, so mount again. If a mount fails, the agent calls `start` again.
        if self._record is not None and self._record.state.state == cri.CONTAINER_RUNNING:
            await mounts.mount_each(self._reactor, self._mounts(self._record))

    def stop(self) -> Deferred[None]:
        return succeed(None)

    def watch(self, changed: Changed, removed: Removed) -> None:
        self._watchers.append((changed, removed))

    def configure(self, sandbox_config: cri.PodSandboxConfig) -> Deferred[None]:
        return succeed(None)

    # The container

    def _state(self) -> messages.ContainerState:
        assert self._record is not None
        state = messages.ContainerState()
        state.CopyFrom(self._record.state)
        return state

    def _existing(self, id: str) -> Record:
        if self._record is None or self._record.state.id != id:
            raise NotFound(f"there is no container {id} in this sandbox's VM")
        return self._record

    def _running(self, id: str) -> Record:
        record = self._existing(id)
        if record.state.state != cri.CONTAINER_RUNNING:
            raise FailedPrecondition(f"container {id} is not running")
        return record

    def _changed(self) -> None:
        assert self._record is not None
        records.save(self._config.state_dir, self._record)
        for changed, _ in self._watchers:
            changed(self._state())
        if self._record.state.state == cri.CONTAINER_EXITED:
            self._ended.succeed(None)

    def _mounts(self, record: Record) -> list[mounts.Mount]:
        return [(one.host_path, one.container_path, one.readonly) for one in record.config.mounts]

    @deferred
    async def create(
        self, id: str, image_id: str, config: cri.ContainerConfig, sandbox_config: cri.PodSandboxConfig
    ) -> messages.ContainerState:
        async with self._lock:
            return await self._create(id, image_id, config)

    async def _create(self, id: str, image_id: str, config: cri.ContainerConfig) -> messages.ContainerState:
        if self._record is not None and self._record.state.id == id:
            return self._state()
        if self._record is not None:
            raise FailedPrecondition(
                f"this VM is container {self._record.state.id}: a pod whose image is the VM has one container"
            )
        for field in ("command", "args"):
            if getattr(config, field):
                raise InvalidArgument(
                    f"config.{field}: the image is a whole VM, which runs what it was built for; leave it out"
                )
        if config.tty or config.stdin:
            raise InvalidArgument("config.tty, config.stdin: a VM has neither; leave them out")
        if config.devices:
            raise InvalidArgument(
                f"config.devices ({config.devices[0].container_path[:200]}): the image is a whole VM, which "
                "has its devices under their own names; give it volumes with a file system"
            )
        wanted = mounts.validated(config)
        state = messages.ContainerState(
            id=id, state=cri.CONTAINER_CREATED, created_at=time.time_ns(), image_id=image_id
        )
        state.resources.CopyFrom(config.linux.resources)
        try:
            await mounts.mount(self._reactor, wanted)
        except BaseException:
            await mounts.unmount(self._reactor, wanted)
            raise
        self._record, self._ended = Record(state, config, log=id), Event()
        self._changed()
        return self._state()

    @deferred
    async def start_container(self, id: str) -> messages.ContainerState:
        record = self._existing(id)
        if record.state.state == cri.CONTAINER_EXITED:
            raise FailedPrecondition(f"container {id} has ended: its VM is powering off")
        if record.state.state == cri.CONTAINER_CREATED:
            record.state.state = cri.CONTAINER_RUNNING
            record.state.started_at = time.time_ns()
            record.state.pid = 1
            record.state.user.linux.SetInParent()
            self._changed()
        return self._state()

    @deferred
    async def stop_container(self, id: str, grace_seconds: int) -> messages.ContainerState:
        record = self._existing(id)
        if record.state.state == cri.CONTAINER_RUNNING:
            # Report the end before the VM powers off, and the agent with it.
            record.state.state = cri.CONTAINER_EXITED
            record.state.finished_at = time.time_ns()
            record.state.exit_code = 0 if grace_seconds else 137
            record.state.reason = "Completed" if grace_seconds else "Error"
            record.state.pid = 0
            self._changed()
            command = self._config.stop_command if grace_seconds else self._config.kill_command
            await self._run(command)
        return self._state()

    async def _run(self, command: Sequence[str]) -> None:
        try:
            await check(self._reactor, Command(command, _POWER_OFF_SECONDS))
        except InfranetesError as error:
            _log.error("the VM was not powered off: {error}; the node will end it", error=error)

    @deferred
    async def remove(self, id: str) -> None:
        async with self._lock:
            await self._remove(id)

    async def _remove(self, id: str) -> None:
        record = self._record
        if record is None or record.state.id != id:
            return
        if record.state.state == cri.CONTAINER_RUNNING:
            await self.stop_container(id, 0)
        await mounts.unmount(self._reactor, self._mounts(record))
        records.remove(self._config.state_dir, id)
        self._record = None
        for _, removed in self._watchers:
            removed(id)
        self._ended.succeed(None)

    @deferred
    async def update(self, id: str, resources: cri.LinuxContainerResources) -> messages.ContainerState:
        """Record new limits, without effect: the VM keeps the size that it was created with."""
        record = self._existing(id)
        check_not_negative(resources)
        before = self._state()
        merge(record.state.resources, resources)
        if record.state != before:
            self._changed()
        return self._state()

    def containers(self) -> Deferred[list[messages.ContainerState]]:
        return succeed([self._state()] if self._record is not None else [])

    def usage(self) -> Deferred[list[messages.ContainerUsage]]:
        """Return the whole VM's usage as the container's."""
        if self._record is None:
            return succeed([])
        state = self._record.state
        found = messages.ContainerUsage(id=state.id, started_at=state.started_at)
        if state.state == cri.CONTAINER_RUNNING:
            found.usage.CopyFrom(stats.usage(stats.read()))
        return succeed([found])

    # Commands and streams

    def _environment(self, record: Record) -> dict[str, str]:
        variables = {env.key: env.value.decode(errors="surrogateescape") for env in record.config.envs}
        return {"PATH": PATH, "HOME": "/root", **variables}

    @deferred
    async def exec_sync(self, id: str, command: Sequence[str], timeout: float, max_output: int) -> ExecResult:
        record = self._running(id)
        cwd, score = record.config.working_dir or "/", record.state.resources.oom_score_adj
        environment = self._environment(record)
        return await exec_sync(self._reactor, command, environment, cwd, score, timeout, max_output)

    @deferred
    async def exec_session(self, id: str, command: Sequence[str], streams: Streams) -> ISession:
        record = self._running(id)
        cwd, score = record.config.working_dir or "/", record.state.resources.oom_score_adj
        environment = self._environment(record)
        session: ISession = ExecSession.spawn(self._reactor, command, environment, cwd, score, streams)
        return session

    @deferred
    async def attach_session(self, id: str, streams: Streams) -> ISession:
        record = self._running(id)
        now = time.time_ns()
        reading = logs.records(self._reactor, self._journal, "", True, self._ended.wait(), now)
        session: ISession = AttachSession(
            self._reactor, reading, now, streams, None, 0, lambda: record.state.exit_code
        )
        return session

    async def read_log(
        self, id: str, cursor: str, follow: bool, text: bool = False
    ) -> AsyncGenerator[messages.LogRecord, None]:
        self._existing(id)
        finished = self._ended.wait()
        reading = logs.records(self._reactor, self._journal, cursor, follow, finished, text=text)
        try:
            async for record in reading:
                yield record
        finally:
            await reading.aclose()

    # Images

    def missing_layers(self, diff_ids: Sequence[str]) -> Deferred[int]:
        return succeed(len(diff_ids))

    def load_image(self, image_id: str, archive: AsyncIterator[bytes]) -> Deferred[None]:
        return fail(FailedPrecondition("the image of this container is its VM: set imgprovider on the node"))

    def images(self) -> Deferred[list[str]]:
        return succeed([self._record.state.image_id] if self._record is not None else [])

    def remove_image(self, image_id: str) -> Deferred[None]:
        if self._record is not None and self._record.state.image_id == image_id:
            return fail(FailedPrecondition(f"image {image_id} is in use: it is this VM"))
        return succeed(None)
