# SPDX-License-Identifier: Apache-2.0
"""The ContainerProvider for Docker: it changes the containers that `index` has."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import attrs
from attrs.validators import gt
from twisted.internet.defer import Deferred, succeed
from zope.interface import implementer

from infranetes_common.concurrency import Flight, KeyedLock, deferred, sleep
from infranetes_common.errors import (
    AlreadyExists,
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from vmserver.containers.apparmor import ProfileLoader
from vmserver.containers.docker import accounts, cgroups
from vmserver.containers.docker.engine import CALL_SECONDS, Engine, EngineError
from vmserver.containers.docker.engine_start import start_engine
from vmserver.containers.docker.execs import exec_sync
from vmserver.containers.docker.image_volumes import ImageVolumes
from vmserver.containers.docker.images import Images
from vmserver.containers.docker.index import RETRY_SECONDS, ContainerIndex
from vmserver.containers.docker.limits import LimitStore
from vmserver.containers.docker.names import container_name
from vmserver.containers.docker.pod_processes import PodProcesses
from vmserver.containers.docker.sessions import attach_session, exec_session
from vmserver.containers.docker.translate import create_body, limits_body
from vmserver.containers.exec_limits import check_executable
from vmserver.containers.interface import (
    Changed,
    ExecResult,
    IContainerProvider,
    ISession,
    Removed,
    Streams,
)
from vmserver.containers.jsonlog import JsonLog
from vmserver.containers.log_lines import records
from vmserver.containers.security import apparmor_profile
from vmserver.pod_settings import SEEN_BY_CONTAINERS, ipc_sysctls
from vmserver.stats.reader import UsageReader

REMOVE_SECONDS = 60.0

T = TypeVar("T")


@attrs.frozen
class DockerConfig:
    """`[providers.docker]` of the agent's configuration."""

    socket: Path = Path("/run/docker.sock")
    # The command that starts the engine if it does not run, and ends once it answers; empty: none.
    start_command: tuple[str, ...] = ()
    start_seconds: float = attrs.field(default=90.0, validator=gt(0))  # until start_command has to end
    log_max_size: str = "16m"  # per log file, in the notation of Docker's json-file driver
    log_max_files: int = 4  # log files, including the newest


@implementer(IContainerProvider)
class DockerProvider:
    """An `IContainerProvider` whose containers are Docker's.

    :param etc_dir: has the sandbox's hosts, hostname and resolv.conf, which every container sees.
    :param run_dir: the agent's; images that are volumes are mounted below it.
    """

    name = "docker"

    def __init__(self, reactor: IReactor, config: DockerConfig, etc_dir: Path, run_dir: Path) -> None:
        self._reactor = reactor
        self._config = config
        self._files = {f"/etc/{name}": etc_dir / name for name in SEEN_BY_CONTAINERS}
        self._engine = Engine(reactor, config.socket)
        self._images = Images(self._engine)
        self._accounts = accounts.ImageAccounts(self._engine)
        self._image_volumes = ImageVolumes(reactor, self._engine, run_dir / self.name / "images")
        self._profiles = ProfileLoader(reactor)
        self._usage = UsageReader(reactor)
        self._limits = LimitStore(run_dir / self.name / "limits")
        self._index = ContainerIndex(reactor, self._engine, self._limits, run_dir / self.name / "users")
        self._processes = PodProcesses(self._engine)
        self._starting: dict[str, Flight[messages.ContainerState]] = {}
        self._creating: KeyedLock[str] = KeyedLock()

    # Starting and stopping

    @deferred
    async def start(self) -> None:
        if self._config.start_command:
            await start_engine(self._reactor, self._config.start_command, self._config.start_seconds)
        await self._index.start()
        await self._processes.release(self._empty)

    def stop(self) -> Deferred[None]:
        self._index.stop()
        self._usage.stop()
        return self._engine.close()

    def watch(self, changed: Changed, removed: Removed) -> None:
        self._index.watch(changed, removed)

    def configure(self, sandbox_config: cri.PodSandboxConfig) -> Deferred[None]:
        return succeed(None)

    # Containers

    @deferred
    async def create(
        self, id: str, image_id: str, config: cri.ContainerConfig, sandbox_config: cri.PodSandboxConfig
    ) -> messages.ContainerState:
        cgroups.check(config.linux.resources)
        async with self._creating.held(id):
            return await self._create(id, image_id, config, sandbox_config)

    async def _create(
        self, id: str, image_id: str, config: cri.ContainerConfig, sandbox_config: cri.PodSandboxConfig
    ) -> messages.ContainerState:
        log_options = {
            "max-size": self._config.log_max_size,
            "max-file": str(self._config.log_max_files),
            "compress": "false",
        }
        body = create_body(
            id,
            image_id,
            config,
            identity=await self._identity(image_id, config.linux.security_context),
            files=self._files,
            log_options=log_options,
            exists=lambda path: Path(path).exists(),
            ipc_sysctls=ipc_sysctls(sandbox_config),
            image_paths=await self._image_volumes.paths(config.mounts),
        )
        profile = apparmor_profile(config.linux.security_context)
        if profile.kind == cri.SecurityProfile.Localhost:
            await self._profiles.load(profile.reference)
        if config.linux.security_context.namespace_options.pid == cri.POD:
            await self._processes.ensure()
        try:
            await self._engine.call("POST", "/containers/create", {"name": container_name(id)}, body)
        except EngineError as error:
            translated = error.translated(f"creating container {id}")
            if isinstance(translated, NotFound):
                raise FailedPrecondition(f"image {image_id} is not loaded; load it first") from error
            if not isinstance(translated, AlreadyExists):
                raise translated from error
        # The engine may still be working on the same request of an earlier agent.
        deadline = self._reactor.seconds() + CALL_SECONDS
        while (container := await self._index.refresh(id)) is None:
            if self._reactor.seconds() > deadline:
                raise Unavailable(f"Docker did not create container {id} within {CALL_SECONDS:g} s")
            await sleep(self._reactor, RETRY_SECONDS[0])
        return container.state

    async def _identity(
        self, image_id: str, context: cri.LinuxContainerSecurityContext
    ) -> accounts.DockerUser:
        """Return the user and groups of the first process."""
        configured = accounts.configured(context)
        if configured is not None:
            return configured
        try:
            return accounts.resolve(context, await self._accounts.of(image_id))
        except EngineError as error:
            if error.status == 404:
                raise FailedPrecondition(f"image {image_id} is not loaded; load it first") from error
            raise error.translated(f"reading the users of image {image_id}") from error

    def start_container(self, id: str) -> Deferred[messages.ContainerState]:
        """See `IContainerProvider.start_container`.

        Concurrent calls share one start, which goes on even if all of them are cancelled: a second start
        would run a container again that has ended meanwhile."""
        starting = self._starting.get(id)
        if starting is None:
            starting = Flight(self._start_container(id))
            if not starting.done:
                self._starting[id] = starting
        return starting.join()

    async def _start_container(self, id: str) -> messages.ContainerState:
        try:
            return await self._start_created(id)
        finally:
            self._starting.pop(id, None)

    async def _start_created(self, id: str) -> messages.ContainerState:
        container = self._index.get(id) if self._index.live else None
        if container is None or container.state.state != cri.CONTAINER_CREATED:
            container = await self._index.existing(id)
        if container.has_ended:
            reason = container.state.reason
            raise FailedPrecondition(f"container {id} has ended ({reason}); make another one")
        if container.state.state == cri.CONTAINER_RUNNING:
            return container.state
        too_long = _too_long(container.command, container.environment)
        if container.shares_processes:
            await self._processes.ensure()
        try:
            await self._engine.call(
                "POST", f"/containers/{container_name(id)}/start", within=2 * CALL_SECONDS
            )
        except EngineError as error:
            state = (await self._index.existing(id)).state
            if state.state != cri.CONTAINER_EXITED:
                raise error.translated(f"starting container {id}") from error
            kind = InvalidArgument if state.exit_code in (126, 127) else FailedPrecondition
            raise kind(f"container {id} can't be started: Docker says: {error.message}") from error
        if too_long is not None:  # what the container has found out itself, and tells nobody
            await self._stop_container(id, 0)
            raise InvalidArgument(f"container {id} can't be started: {too_long}")
        container = await self._index.existing(id)
        if container.state.pid:
            await self._apply_limits(id, container.state)
        return container.state

    async def _apply_limits(self, id: str, state: messages.ContainerState) -> None:
        """Apply the limits that the engine does not support, or kill the container if that fails."""
        try:
            cgroups.apply(state.pid, state.resources)
            changes = self._limits.get(id)
            if changes is not None and changes.oom_score_adj:
                _adjust_oom_score(state.pid, changes.oom_score_adj)
        except InvalidArgument:
            await self._stop_container(id, 0)
            raise

    @deferred
    async def stop_container(self, id: str, grace_seconds: int) -> messages.ContainerState:
        starting = self._starting.get(id)
        if starting is not None:
            with contextlib.suppress(InfranetesError):
                await starting.join()
        return await self._stop_container(id, grace_seconds)

    async def _stop_container(self, id: str, grace: int) -> messages.ContainerState:
        container = await self._index.existing(id)
        if container.state.state != cri.CONTAINER_RUNNING:
            return container.state
        path = f"/containers/{container_name(id)}"
        try:
            if grace:
                await self._engine.call(
                    "POST", path + "/stop", {"t": str(grace)}, within=grace + CALL_SECONDS
                )
            else:
                await self._engine.call("POST", path + "/kill", {"signal": "SIGKILL"})
                await self._engine.call("POST", path + "/wait", {"condition": "not-running"})
        except EngineError as error:
            if error.status not in (304, 404, 409):
                raise error.translated(f"stopping container {id}") from error
        return (await self._index.existing(id)).state

    @deferred
    async def remove(self, id: str) -> None:
        path = f"/containers/{container_name(id)}"
        deadline = self._reactor.seconds() + REMOVE_SECONDS
        while True:
            try:
                await self._engine.call("DELETE", path, {"force": "1", "v": "1"})
            except EngineError as error:
                in_progress = error.status == 409 and self._reactor.seconds() < deadline
                if error.status != 404 and not in_progress:
                    raise error.translated(f"removing container {id}") from error
            if await self._index.refresh(id) is None:
                break
            await sleep(self._reactor, RETRY_SECONDS[0])
        await self._processes.release(self._empty)

    def _empty(self) -> bool:
        """Return whether there is no container, not even one that is being created."""
        return self._index.live and not self._index.all() and not self._creating.busy()

    @deferred
    async def update(self, id: str, resources: cri.LinuxContainerResources) -> messages.ContainerState:
        container = await self._index.existing(id)
        cgroups.check(resources)
        body = limits_body(resources)
        score = resources.oom_score_adj
        body.pop("OomScoreAdj", None)
        pid = container.state.pid
        by_cgroup = bool(pid) and cgroups.is_v2()
        if resources.memory_limit_in_bytes < 0 and not by_cgroup:
            raise InvalidArgument(
                "resources.memory_limit_in_bytes: Docker takes no limit away; only a container that runs, "
                "in a VM with cgroup v2, can lose it"
            )
        if body and not by_cgroup:
            try:
                await self._engine.call("POST", f"/containers/{container_name(id)}/update", body=body)
            except EngineError as error:
                refused = error.translated(f"resources of container {id}")
                # If the kernel refuses a limit, such as less memory than is in use, Docker reports an
                # internal error.
                raise InvalidArgument(str(refused)) if error.status == 500 else refused from error
        if pid:
            cgroups.apply(pid, resources, every=by_cgroup)
            if score and score != container.state.resources.oom_score_adj:
                _adjust_oom_score(pid, score)
        self._limits.put(id, resources)
        return (await self._index.existing(id)).state

    @deferred
    async def containers(self) -> list[messages.ContainerState]:
        if not self._index.live:
            await self._index.resync()
        return [container.state for container in self._index.all().values()]

    @deferred
    async def usage(self) -> list[messages.ContainerUsage]:
        containers = self._index.all().items()
        return await self._usage.read({id: (each.state, each.usage_source) for id, each in containers})

    # Commands and streams

    @deferred
    async def exec_sync(self, id: str, command: Sequence[str], timeout: float, max_output: int) -> ExecResult:
        self._check_command(id, command)
        running = exec_sync(self._reactor, self._engine, container_name(id), command, timeout, max_output)
        return await self._in_running(id, running)

    @deferred
    async def exec_session(self, id: str, command: Sequence[str], streams: Streams) -> ISession:
        self._check_command(id, command)
        opening = exec_session(
            self._reactor, self._engine, self._config.socket, container_name(id), command, streams
        )
        return await self._in_running(id, opening)

    def _check_command(self, id: str, command: Sequence[str]) -> None:
        """Check that the kernel executes a command in a container. :raise InvalidArgument: it does not."""
        container = self._index.get(id)
        check_executable(command, () if container is None else container.environment)

    @deferred
    async def attach_session(self, id: str, streams: Streams) -> ISession:
        opening = attach_session(
            self._reactor, self._engine, self._config.socket, container_name(id), streams
        )
        return await self._in_running(id, opening)

    async def _in_running(self, id: str, work: Awaitable[T]) -> T:
        """Await `work` in a running container, with Docker's refusals as our errors."""
        try:
            return await work
        except EngineError as error:
            if error.status == 404:
                raise NotFound(f"there is no container {id} in this sandbox's VM") from error
            if error.status == 409:
                raise FailedPrecondition(f"container {id} is not running") from error
            raise error.translated(f"running a command in container {id}") from error

    async def read_log(
        self, id: str, cursor: str, follow: bool, text: bool = False
    ) -> AsyncGenerator[messages.LogRecord, None]:
        container = self._index.get(id) or await self._index.existing(id)
        if not container.log_path:
            container = await self._index.existing(id)
        log = JsonLog(Path(container.log_path), cursor) if container.log_path else None
        while log is None:
            # Docker sets the log's path when the container is started for the first time.
            if not follow or self._has_ended(id):
                return
            await sleep(self._reactor, RETRY_SECONDS[0])
            found = self._index.get(id)
            log = JsonLog(Path(found.log_path), cursor) if found is not None and found.log_path else None
        reading = records(self._reactor, log, follow, lambda: self._has_ended(id), text)
        try:
            async for record in reading:
                yield record
        finally:
            await reading.aclose()

    def _has_ended(self, id: str) -> bool:
        container = self._index.get(id)
        return container is None or container.has_ended

    # Images

    @deferred
    async def missing_layers(self, diff_ids: Sequence[str]) -> int:
        with _translated("listing images"):
            return await self._images.missing_layers(diff_ids)

    @deferred
    async def load_image(self, image_id: str, archive: AsyncIterator[bytes]) -> None:
        await self._images.load(image_id, archive)

    @deferred
    async def images(self) -> list[str]:
        with _translated("listing images"):
            return await self._images.ids()

    @deferred
    async def remove_image(self, image_id: str) -> None:
        with _translated(f"removing image {image_id}"):
            await self._image_volumes.release(image_id)
        await self._images.remove(image_id)


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    """Raise the engine's refusals as our errors. :param what: what is attempted, for the message."""
    try:
        yield
    except EngineError as error:
        raise error.translated(what) from error


def _adjust_oom_score(pid: int, score: int) -> None:
    try:
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(score))
    except ProcessLookupError:
        return
    except OSError as error:
        raise InvalidArgument(f"resources.oom_score_adj {score}: {error.strerror}") from error


def _too_long(command: Sequence[str], environment: Sequence[str]) -> InvalidArgument | None:
    try:
        check_executable(command, environment)
    except InvalidArgument as error:
        return error
    return None
