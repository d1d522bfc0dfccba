# SPDX-License-Identifier: Apache-2.0
"""The ContainerProvider called "fake"."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path

import attrs
from twisted.internet.defer import Deferred, succeed
from zope.interface import implementer

from infranetes_common.commands import PATH
from infranetes_common.concurrency import deferred, run_in_thread
from infranetes_common.errors import FailedPrecondition, NotFound
from infranetes_common.processes import kill_family, start_ticks
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from infranetes_simulation.containers import archive as archives
from infranetes_simulation.containers.container import Container
from infranetes_simulation.containers.files import Files, Record
from vmserver.containers.child_exec import exec_sync
from vmserver.containers.child_sessions import AttachSession, ExecSession
from vmserver.containers.interface import (
    Changed,
    ExecResult,
    IContainerProvider,
    IHasUserNamespaces,
    ISession,
    Removed,
    Streams,
)
from vmserver.containers.jsonlog import JsonLog
from vmserver.containers.log_lines import records
from vmserver.containers.signals import signal_number
from vmserver.stats import family


@attrs.frozen
class FakeConfig:
    """`[providers.fake]`"""

    state_dir: Path | None = None  # run_dir/fake
    layers: bool = False  # whether images come as layers


@implementer(IContainerProvider, IHasUserNamespaces)
class FakeProvider:
    """See `IContainerProvider`.

    :param directory: where the state is; made by `start`.
    """

    name = "fake"

    def __init__(self, reactor: IReactor, directory: Path) -> None:
        self._reactor = reactor
        self._files = Files(directory)
        self._containers: dict[str, Container] = {}
        self._images: set[str] = set()
        self._watchers: list[tuple[Changed, Removed]] = []

    @deferred
    async def start(self) -> None:
        try:
            self._files.make()
            self._load()
        except OSError as error:
            raise FailedPrecondition(
                f"the state directory {self._files.directory} can't be used: {error.strerror}"
            ) from error

    def _load(self) -> None:
        self._images |= self._files.load_images()
        for record in self._files.load():
            if record.state.id not in self._containers:
                container = Container(self._reactor, self._files, record, self._report)
                self._containers[container.id] = container
                container.refresh()

    def stop(self) -> Deferred[None]:
        for container in self._containers.values():
            container.unfollow()
        return succeed(None)

    def cut_power(self) -> None:
        """Kill every process of every container at once, as if the machine were switched off.

        Containers that only an earlier process knew are killed too.
        """
        for running in self._files.all_running():
            if start_ticks(running["shim"]) == running["ticks"]:
                kill_family(running["shim"])
                kill_family(running["pid"])

    def watch(self, changed: Changed, removed: Removed) -> None:
        self._watchers.append((changed, removed))

    def _report(self, container: Container) -> None:
        state = container.snapshot()
        for changed, _ in self._watchers:
            changed(state)

    def configure(self, sandbox_config: cri.PodSandboxConfig) -> Deferred[None]:
        return succeed(None)

    # Containers

    @deferred
    async def create(
        self, id: str, image_id: str, config: cri.ContainerConfig, sandbox_config: cri.PodSandboxConfig
    ) -> messages.ContainerState:
        if id in self._containers:
            return self._containers[id].snapshot()
        if image_id not in await self.images():
            raise FailedPrecondition(f"image {image_id} is not loaded; load it first")
        record = _record(id, image_id, config)
        self._files.save(record)
        container = self._containers[id] = Container(self._reactor, self._files, record, self._report)
        self._report(container)
        return container.snapshot()

    def _existing(self, id: str) -> Container:
        container = self._containers.get(id)
        if container is None:
            raise NotFound(f"there is no container {id} in this sandbox's VM")
        return container

    def _running(self, id: str) -> Container:
        container = self._existing(id)
        if not container.running:
            raise FailedPrecondition(f"container {id} is not running")
        return container

    @deferred
    async def start_container(self, id: str) -> messages.ContainerState:
        container = self._existing(id)
        await container.start()
        return container.snapshot()

    @deferred
    async def stop_container(self, id: str, grace_seconds: int) -> messages.ContainerState:
        container = self._existing(id)
        await container.stop(grace_seconds)
        return container.snapshot()

    @deferred
    async def remove(self, id: str) -> None:
        container = self._containers.get(id)
        if container is None:
            return
        await container.started()
        await container.stop(0)
        if self._containers.pop(id, None) is None:
            return
        self._files.remove(id)
        for _, removed in self._watchers:
            removed(id)

    @deferred
    async def update(self, id: str, resources: cri.LinuxContainerResources) -> messages.ContainerState:
        container = self._existing(id)
        container.update(resources)
        return container.snapshot()

    def containers(self) -> Deferred[list[messages.ContainerState]]:
        return succeed([container.snapshot() for container in self._containers.values()])

    @deferred
    async def usage(self) -> list[messages.ContainerUsage]:
        states = [container.snapshot() for container in self._containers.values()]
        return await run_in_thread(self._reactor, _thd_measure, states)

    # Commands, clients, logs

    @deferred
    async def exec_sync(self, id: str, command: Sequence[str], timeout: float, max_output: int) -> ExecResult:
        record = self._running(id).record
        env, cwd = {"PATH": PATH, **record.env}, record.cwd or "/"
        score = record.state.resources.oom_score_adj
        return await exec_sync(self._reactor, command, env, cwd, score, timeout, max_output)

    @deferred
    async def exec_session(self, id: str, command: Sequence[str], streams: Streams) -> ISession:
        record = self._running(id).record
        env, cwd = {"PATH": PATH, **record.env}, record.cwd or "/"
        score = record.state.resources.oom_score_adj
        session: ISession = ExecSession.spawn(self._reactor, command, env, cwd, score, streams)
        return session

    @deferred
    async def attach_session(self, id: str, streams: Streams) -> ISession:
        container = self._running(id)
        stdin = container.record.stdin
        session: ISession = AttachSession(
            self._reactor,
            self.read_log(id, "", True),
            time.time_ns(),
            streams,
            self._files.path(id, ".stdin") if stdin else None,
            container.shim if stdin == "once" else 0,
            lambda: container.record.state.exit_code,
        )
        return session

    async def read_log(
        self, id: str, cursor: str, follow: bool, text: bool = False
    ) -> AsyncGenerator[messages.LogRecord, None]:
        container = self._existing(id)
        log = JsonLog(self._files.path(id, ".log"), cursor)
        if not container.record.argv:
            # It never writes, so there is nothing but its end to wait for.
            if follow and id in self._containers:
                await container.over.wait()
            return
        reading = records(self._reactor, log, follow, lambda: self._is_over(id), text)
        try:
            async for record in reading:
                yield record
        finally:
            await reading.aclose()

    def _is_over(self, id: str) -> bool:
        container = self._containers.get(id)
        return container is None or container.exited

    # Images

    def missing_layers(self, diff_ids: Sequence[str]) -> Deferred[int]:
        return succeed(len(diff_ids))

    @deferred
    async def load_image(self, image_id: str, archive: AsyncIterator[bytes]) -> None:
        if image_id in self._images:
            async for _ in archive:
                pass
            return
        await archives.check(image_id, archive)
        self._images.add(image_id)
        self._files.save_images(self._images)

    def images(self) -> Deferred[list[str]]:
        return succeed(sorted(self._images))

    @deferred
    async def remove_image(self, image_id: str) -> None:
        self._check_unused(image_id)
        if image_id in self._images:
            self._images.discard(image_id)
            self._files.save_images(self._images)

    def _check_unused(self, image_id: str) -> None:
        if any(container.record.state.image_id == image_id for container in self._containers.values()):
            raise FailedPrecondition(f"image {image_id} is in use; remove its containers first")


def _record(id: str, image_id: str, config: cri.ContainerConfig) -> Record:
    default = config.stop_signal == cri.RUNTIME_DEFAULT
    number = signal.SIGTERM if default else signal_number(config.stop_signal)
    state = messages.ContainerState(
        id=id, state=cri.CONTAINER_CREATED, created_at=time.time_ns(), image_id=image_id
    )
    state.resources.CopyFrom(config.linux.resources)
    argv = [*config.command, *config.args]
    if not argv:
        return Record(state, argv, int(number))
    env = {env.key: env.value.decode(errors="surrogateescape") for env in config.envs}
    stdin = ("once" if config.stdin_once else "open") if config.stdin else ""
    return Record(state, argv, int(number), {"PATH": PATH, **env}, config.working_dir, stdin)


def _thd_measure(states: Sequence[messages.ContainerState]) -> list[messages.ContainerUsage]:
    result = []
    for state in states:
        usage = messages.ContainerUsage(id=state.id, started_at=state.started_at)
        if state.state == cri.CONTAINER_RUNNING:
            # Without a command there is no process, and no usage.
            used = family.usage(state.pid, state.resources.memory_limit_in_bytes) if state.pid else None
            usage.usage.CopyFrom(used or messages.Usage(time_nanos=time.time_ns()))
        result.append(usage)
    return result
