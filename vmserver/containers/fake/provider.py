"""See the package's docstring; what is true of a container follows from its `files`."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.threads import deferToThreadPool
from zope.interface import implementer

from infranetes_common import cri
from infranetes_common import vmserver as messages
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument, NotFound
from vmserver.containers.fake import archive as archives
from vmserver.containers.fake.execs import exec_sync
from vmserver.containers.fake.files import Container, Files
from vmserver.containers.fake.sessions import AttachSession, ExecSession
from vmserver.containers.fake.supervisor import Supervisor
from vmserver.containers.interface import ExecResult, IContainerProvider, ISession, Streams
from vmserver.containers.jsonlog import JsonLog, records
from vmserver.containers.signals import signal_number
from vmserver.processes import ProcessEnd, kill_family, start_ticks
from vmserver.stats import family

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@attrs.frozen
class FakeConfig:
    """`[providers.fake]`"""

    state_dir: Path | None = None  # run_dir/fake


@implementer(IContainerProvider)
class FakeProvider:
    """See `IContainerProvider`.

    :param directory: where the state is; made when it is first needed.
    """

    name = "fake"

    def __init__(self, reactor: Any, directory: Path) -> None:
        self._reactor = reactor
        self._files = Files(directory)
        self._view: dict[str, Container] = {}
        self._images: set[str] = set()
        self._watchers: list[tuple[Callable[[Any], None], Callable[[str], None]]] = []

    # Life

    def start(self) -> Deferred[None]:
        try:
            self._files.make()
            self._load()
        except OSError as error:
            words = f"the state directory {self._files.directory} can't be used: {error.strerror}"
            return fail(FailedPrecondition(words))
        return succeed(None)

    def stop(self) -> Deferred[None]:
        for container in self._view.values():
            if container.end is not None:
                container.end.close()
                container.end = None
        return succeed(None)

    def cut_power(self) -> None:
        """End every process of every container at once, as if the machine were switched off; also of
        containers that only an earlier process knew."""
        for running in self._files.running():
            if start_ticks(running["shim"]) == running["ticks"]:
                kill_family(running["shim"])
                kill_family(running["pid"])

    def watch(self, changed: Callable[[Any], None], removed: Callable[[str], None]) -> None:
        self._watchers.append((changed, removed))

    def configure(self, sandbox_config: Any) -> Deferred[None]:
        return succeed(None)

    def _load(self) -> None:
        self._images |= self._files.load_images()
        for container in self._files.load():
            if container.state.id not in self._view:
                self._view[container.state.id] = container
                if container.has_command:
                    self._look(container)

    # One container's truth

    def _look(self, container: Container) -> None:
        """Bring the view up to what the files say."""
        id = container.state.id
        ended = self._files.read(id, ".exit")
        running = self._files.read(id, ".run")
        if ended is None and running is not None:
            if start_ticks(running["shim"]) == running["ticks"] and self._follow(container, running):
                return
            ended = self._files.read(id, ".exit")  # it may have ended between the two
            if ended is None:
                kill_family(running["pid"])
                words = "the process that watched over it was killed"
                ended = {**running, "exit_code": 137, "finished_at": time.time_ns(), "error": words}
                self._files.write(id, ".exit", ended)
        if ended is not None:
            self._has_ended(container, ended)

    def _follow(self, container: Container, running: Any) -> bool:
        try:
            if container.end is None:
                container.end = ProcessEnd(
                    self._reactor, running["shim"], lambda: self._shim_ended(container)
                )
        except ProcessLookupError:
            return False
        state = container.state
        container.shim = running["shim"]
        if state.state != cri.CONTAINER_RUNNING:
            state.state = cri.CONTAINER_RUNNING
            state.started_at = running["started_at"]
            state.pid = running["pid"]
            self._changed(container)
        return True

    def _shim_ended(self, container: Container) -> None:
        container.end = None
        self._look(container)

    def _has_ended(self, container: Container, ended: Any) -> None:
        state = container.state
        if state.state == cri.CONTAINER_EXITED:
            return
        state.state = cri.CONTAINER_EXITED
        state.started_at = ended["started_at"]
        state.finished_at = ended["finished_at"]
        state.exit_code = ended["exit_code"]
        state.message = ended["error"]
        state.pid = 0
        if ended["error"] and state.exit_code in (126, 127):
            state.reason = "ContainerCannotRun"
        else:
            state.reason = "Error" if state.exit_code else "Completed"
        self._changed(container)

    def _changed(self, container: Container) -> None:
        self._files.save(container)
        state = messages.ContainerState()
        state.CopyFrom(container.state)
        for changed, _ in self._watchers:
            changed(state)
        if state.state == cri.CONTAINER_EXITED:
            waiting, container.stopped = container.stopped, []
            for each in waiting:
                each.callback(None)

    # Containers

    def create(self, id: str, image_id: str, config: Any, sandbox_config: Any) -> Deferred[Any]:
        return Deferred.fromCoroutine(self._create(id, image_id, config))

    async def _create(self, id: str, image_id: str, config: Any) -> Any:
        if id in self._view:
            return self._state(self._view[id])
        if image_id not in self._images:
            raise FailedPrecondition(f"image {image_id} is not loaded; load it first")
        number = (
            signal.SIGTERM if config.stop_signal == cri.RUNTIME_DEFAULT else signal_number(config.stop_signal)
        )
        state = messages.ContainerState(
            id=id, state=cri.CONTAINER_CREATED, created_at=time.time_ns(), image_id=image_id
        )
        state.resources.CopyFrom(config.linux.resources)
        argv = [*config.command, *config.args]
        container = Container(state, bool(argv), int(number))
        if argv:
            container.env = {
                "PATH": DEFAULT_PATH,
                **{env.key: env.value.decode(errors="surrogateescape") for env in config.envs},
            }
            container.cwd = config.working_dir
            if config.stdin:
                container.stdin = "once" if config.stdin_once else "open"
        self._files.save(container, argv)
        self._view[id] = container
        self._tell(container)
        return self._state(container)

    def _tell(self, container: Container) -> None:
        state = self._state(container)
        for changed, _ in self._watchers:
            changed(state)

    def _state(self, container: Container) -> Any:
        state = messages.ContainerState()
        state.CopyFrom(container.state)
        return state

    def _existing(self, id: str) -> Container:
        container = self._view.get(id)
        if container is None:
            raise NotFound(f"there is no container {id} in this sandbox's VM")
        return container

    def start_container(self, id: str) -> Deferred[Any]:
        return Deferred.fromCoroutine(self._start_container(id))

    async def _start_container(self, id: str) -> Any:
        container = self._existing(id)
        if container.state.state == cri.CONTAINER_CREATED:
            if not container.has_command:
                container.state.state = cri.CONTAINER_RUNNING
                container.state.started_at = time.time_ns()
                self._changed(container)
            else:
                await self._begin(container)
                if container.state.reason == "ContainerCannotRun":
                    raise InvalidArgument(f"container {id} can't be started: {container.state.message}")
            return self._state(container)
        if container.state.state == cri.CONTAINER_EXITED:
            raise FailedPrecondition(f"container {id} has ended ({container.state.reason}); make another one")
        return self._state(container)

    async def _begin(self, container: Container) -> None:
        """Start the shim, or wait with who has; answers when the command runs or can't."""
        if container.starting is None:
            container.starting = Deferred()
            ready = Supervisor.spawn(self._reactor, self._files.directory, container.state.id)
            ready.addBoth(lambda _: self._begun(container))
        mine: Deferred[None] = Deferred()
        container.starting.addBoth(lambda result: mine.callback(None) if not mine.called else None)
        await mine

    def _begun(self, container: Container) -> None:
        starting, container.starting = container.starting, None
        self._look(container)
        if container.state.state == cri.CONTAINER_CREATED:
            now = time.time_ns()
            words = "its supervisor could not be started"
            ended = {"exit_code": 128, "started_at": now, "finished_at": now, "error": words}
            self._files.write(container.state.id, ".exit", ended)
            self._has_ended(container, ended)
        if starting is not None:
            starting.callback(None)

    def stop_container(self, id: str, grace_seconds: int) -> Deferred[Any]:
        return Deferred.fromCoroutine(self._stop_container(id, grace_seconds))

    async def _stop_container(self, id: str, grace: int) -> Any:
        container = self._existing(id)
        if container.state.state == cri.CONTAINER_RUNNING:
            if container.has_command:
                await self._end(container, grace)
            else:
                code = 0 if grace else 137
                now = time.time_ns()
                started = container.state.started_at
                ended = {"exit_code": code, "started_at": started, "finished_at": now, "error": ""}
                self._has_ended(container, ended)
        return self._state(container)

    async def _end(self, container: Container, grace: int) -> None:
        over: Deferred[None] = Deferred(lambda deferred: container.stopped.remove(deferred))
        container.stopped.append(over)
        pid = container.state.pid
        if grace:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, container.signal)
        else:
            kill_family(pid)
        timer = self._reactor.callLater(grace, kill_family, pid) if grace else None
        try:
            await over
        finally:
            if timer is not None and timer.active():
                timer.cancel()

    def remove(self, id: str) -> Deferred[None]:
        return Deferred.fromCoroutine(self._remove(id))

    async def _remove(self, id: str) -> None:
        container = self._view.get(id)
        if container is None:
            return
        if container.starting is not None:
            await self._begin(container)
        if container.state.state == cri.CONTAINER_RUNNING:
            await self._stop_container(id, 0)
        if self._view.pop(id, None) is None:
            return
        self._files.forget(id)
        for _, removed in self._watchers:
            removed(id)

    def update(self, id: str, resources: Any) -> Deferred[Any]:
        return Deferred.fromCoroutine(self._update(id, resources))

    async def _update(self, id: str, resources: Any) -> Any:
        container = self._existing(id)
        before = self._state(container)
        for field, value in resources.ListFields():
            if field.name in ("hugepage_limits", "unified"):
                container.state.resources.ClearField(field.name)
            elif isinstance(value, int) and value < 0 and field.name in _NEVER_NEGATIVE:
                raise InvalidArgument(f"resources.{field.name} {value}: expected 0 or more")
        container.state.resources.MergeFrom(resources)
        if container.state != before:
            self._changed(container)
        return self._state(container)

    def containers(self) -> Deferred[list[Any]]:
        return succeed([self._state(container) for container in self._view.values()])

    def usage(self) -> Deferred[list[Any]]:
        """Without a command there is no process, and so nothing that is used."""
        known = [self._state(container) for container in self._view.values()]
        pool = self._reactor.getThreadPool()
        measured: Deferred[list[Any]] = deferToThreadPool(self._reactor, pool, _thd_measure, known)
        return measured

    def exec_sync(
        self, id: str, command: Sequence[str], timeout: float, max_output: int
    ) -> Deferred[ExecResult]:
        return Deferred.fromCoroutine(self._exec_sync(id, command, timeout, max_output))

    async def _exec_sync(self, id: str, command: Sequence[str], within: float, limit: int) -> ExecResult:
        container = self._running(id)
        env = {"PATH": DEFAULT_PATH, **container.env}
        return await exec_sync(self._reactor, command, env, container.cwd or "/", within, limit)

    def _running(self, id: str) -> Container:
        container = self._existing(id)
        if container.state.state != cri.CONTAINER_RUNNING:
            raise FailedPrecondition(f"container {id} is not running")
        return container

    def exec_session(self, id: str, command: Sequence[str], streams: Streams) -> Deferred[ISession]:
        return Deferred.fromCoroutine(self._exec_session(id, command, streams))

    async def _exec_session(self, id: str, command: Sequence[str], streams: Streams) -> ISession:
        container = self._running(id)
        env = {"PATH": DEFAULT_PATH, **container.env}
        session: ISession = ExecSession.spawn(self._reactor, command, env, container.cwd or "/", streams)
        return session

    def attach_session(self, id: str, streams: Streams) -> Deferred[ISession]:
        return Deferred.fromCoroutine(self._attach_session(id, streams))

    async def _attach_session(self, id: str, streams: Streams) -> ISession:
        container = self._running(id)
        session: ISession = AttachSession(
            self._reactor,
            self.read_log(id, "", True),
            time.time_ns(),
            streams,
            self._files.path(id, ".stdin") if container.stdin else None,
            container.shim if container.stdin == "once" else 0,
            lambda: container.state.exit_code,
        )
        return session

    async def read_log(self, id: str, cursor: str, follow: bool) -> AsyncIterator[Any]:
        container = self._existing(id)
        log = JsonLog(self._files.path(id, ".log"), cursor)
        if not container.has_command:
            # It never writes; its end is all there is to wait for.
            if follow and container.state.state != cri.CONTAINER_EXITED and id in self._view:
                over: Deferred[None] = Deferred(lambda deferred: container.stopped.remove(deferred))
                container.stopped.append(over)
                await over
            return
        reading = records(self._reactor, log, follow, lambda: self._over(id))
        try:
            async for record in reading:
                yield record
        finally:
            await reading.aclose()  # type: ignore[attr-defined]

    def _over(self, id: str) -> bool:
        container = self._view.get(id)
        return container is None or bool(container.state.state == cri.CONTAINER_EXITED)

    # Images

    def missing_layers(self, diff_ids: Sequence[str]) -> Deferred[int]:
        return succeed(len(diff_ids))

    def load_image(self, image_id: str, archive: AsyncIterator[bytes]) -> Deferred[None]:
        return Deferred.fromCoroutine(self._load_image(image_id, archive))

    async def _load_image(self, image_id: str, archive: AsyncIterator[bytes]) -> None:
        if image_id in self._images:
            async for _ in archive:
                pass
            return
        await archives.check(image_id, archive)
        self._images.add(image_id)
        self._files.save_images(self._images)

    def images(self) -> Deferred[list[str]]:
        return succeed(sorted(self._images))

    def remove_image(self, image_id: str) -> Deferred[None]:
        if any(container.state.image_id == image_id for container in self._view.values()):
            words = f"image {image_id} is in use; remove its containers first"
            return fail(FailedPrecondition(words))
        if image_id in self._images:
            self._images.discard(image_id)
            try:
                self._files.save_images(self._images)
            except InfranetesError as error:
                return fail(error)
        return succeed(None)


def _thd_measure(known: Sequence[Any]) -> list[Any]:
    found = []
    for state in known:
        usage = messages.ContainerUsage(id=state.id, started_at=state.started_at)
        if state.state == cri.CONTAINER_RUNNING:
            used = family.usage(state.pid, state.resources.memory_limit_in_bytes) if state.pid else None
            usage.usage.CopyFrom(used or messages.Usage(time_nanos=time.time_ns()))
        found.append(usage)
    return found


_NEVER_NEGATIVE = ("cpu_period", "cpu_shares", "memory_limit_in_bytes")
