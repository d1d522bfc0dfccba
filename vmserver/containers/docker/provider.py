"""The ContainerProvider whose state is Docker's own: `view` knows it, this changes it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.task import deferLater
from zope.interface import implementer

from infranetes_common import cri
from infranetes_common.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from vmserver.containers.docker import accounts, cgroups
from vmserver.containers.docker.apparmor import Profiles
from vmserver.containers.docker.engine import CALL_SECONDS, Engine, EngineError
from vmserver.containers.docker.execs import exec_sync
from vmserver.containers.docker.image_volumes import ImageVolumes
from vmserver.containers.docker.images import Images
from vmserver.containers.docker.limits import Limits
from vmserver.containers.docker.security import NAME_PREFIX, apparmor_profile
from vmserver.containers.docker.sessions import attach_session, exec_session
from vmserver.containers.docker.translate import create_body, resources
from vmserver.containers.docker.usage import Usages
from vmserver.containers.docker.view import RETRY_SECONDS, View
from vmserver.containers.interface import ExecResult, IContainerProvider, ISession, Streams
from vmserver.containers.jsonlog import JsonLog, records
from vmserver.sandbox import ipc_sysctls

REMOVE_SECONDS = 60.0


@attrs.frozen
class DockerConfig:
    """`[providers.docker]`"""

    socket: Path = Path("/run/docker.sock")
    log_max_size: str = "16m"  # of one log file, as Docker's json-file driver reads it
    log_max_files: int = 4  # the newest among them


@implementer(IContainerProvider)
class DockerProvider:
    """See `IContainerProvider`.

    :param etc_dir: where the sandbox's hosts and resolv.conf are, which each container sees.
    :param run_dir: of the agent; images that are volumes are mounted below.
    """

    name = "docker"

    def __init__(self, reactor: Any, config: DockerConfig, etc_dir: Path, run_dir: Path) -> None:
        self._reactor = reactor
        self._config = config
        self._files = {f"/etc/{name}": etc_dir / name for name in ("hosts", "resolv.conf")}
        self._engine = Engine(reactor, config.socket)
        self._images = Images(self._engine)
        self._accounts = accounts.ImageAccounts(self._engine)
        self._image_volumes = ImageVolumes(reactor, self._engine, run_dir / self.name / "images")
        self._profiles = Profiles(reactor)
        self._usages = Usages(reactor)
        self._limits = Limits(run_dir / self.name / "limits")
        self._view = View(reactor, self._engine, self._limits, run_dir / self.name / "users")
        self._making: dict[str, DeferredLock] = {}  # one creation of an id at a time

    # Life

    def start(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self._view.start())

    def stop(self) -> Deferred[None]:
        self._view.stop()
        self._usages.stop()
        return self._engine.close()

    def watch(self, changed: Callable[[Any], None], removed: Callable[[str], None]) -> None:
        self._view.watch(changed, removed)

    def configure(self, sandbox_config: Any) -> Deferred[None]:
        return Deferred.fromCoroutine(_nothing())

    # Containers

    def create(self, id: str, image_id: str, config: Any, sandbox_config: Any) -> Deferred[Any]:
        return Deferred.fromCoroutine(self._create(id, image_id, config, sandbox_config))

    async def _create(self, id: str, image_id: str, config: Any, sandbox_config: Any) -> Any:
        cgroups.check(config.linux.resources)
        lock = self._making.setdefault(id, DeferredLock())
        await lock.acquire()
        try:
            return await self._create_alone(id, image_id, config, sandbox_config)
        finally:
            lock.release()
            if not lock.locked and not lock.waiting:
                self._making.pop(id, None)

    async def _create_alone(self, id: str, image_id: str, config: Any, sandbox_config: Any) -> Any:
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
        kind, profile = apparmor_profile(config.linux.security_context)
        if kind == cri.SecurityProfile.Localhost:
            await self._profiles.load(profile)
        try:
            await self._engine.call("POST", "/containers/create", {"name": NAME_PREFIX + id}, body)
        except EngineError as error:
            translated = error.translated(f"creating container {id}")
            if isinstance(translated, NotFound):
                raise FailedPrecondition(f"image {image_id} is not loaded; load it first") from error
            if not isinstance(translated, AlreadyExists):
                raise translated from error
        # An agent that is gone may have asked for it too, and the engine still be at work.
        deadline = self._reactor.seconds() + CALL_SECONDS
        while (known := await self._view.refresh(id)) is None:
            if self._reactor.seconds() > deadline:
                raise Unavailable(f"Docker is creating container {id} and does not come to an end")
            await deferLater(self._reactor, RETRY_SECONDS[0], lambda: None)
        return known.state

    async def _identity(self, image_id: str, context: Any) -> accounts.Identity:
        """Who the first process is to be."""
        asked = accounts.as_asked(context)
        if asked is not None:
            return asked
        try:
            return accounts.of_image(context, await self._accounts.of(image_id))
        except EngineError as error:
            if error.status == 404:
                raise FailedPrecondition(f"image {image_id} is not loaded; load it first") from error
            raise error.translated(f"reading the users of image {image_id}") from error

    def start_container(self, id: str) -> Deferred[Any]:
        return Deferred.fromCoroutine(self._start_container(id))

    async def _start_container(self, id: str) -> Any:
        known = self._view.get(id) if self._view.live else None
        if known is None or known.state.state != cri.CONTAINER_CREATED:
            known = await self._view.existing(id)
        if known.has_ended:
            raise FailedPrecondition(f"container {id} has ended ({known.state.reason}); make another one")
        if known.state.state == cri.CONTAINER_RUNNING:
            return known.state
        try:
            await self._engine.call("POST", f"/containers/{NAME_PREFIX}{id}/start", within=2 * CALL_SECONDS)
        except EngineError as error:
            state = (await self._view.existing(id)).state
            if state.state != cri.CONTAINER_EXITED:
                raise error.translated(f"starting container {id}") from error
            kind = InvalidArgument if state.exit_code in (126, 127) else FailedPrecondition
            raise kind(f"container {id} can't be started: Docker says: {error.message}") from error
        known = await self._view.existing(id)
        if known.state.pid:
            await self._limit(id, known.state)
        return known.state

    async def _limit(self, id: str, state: Any) -> None:
        """Put in force what the engine knows nothing of. A container that can't have it does not run."""
        try:
            cgroups.apply(state.pid, state.resources)
            changed = self._limits.of(id)
            if changed is not None and changed.oom_score_adj:
                _adjust_oom_score(state.pid, changed.oom_score_adj)
        except InvalidArgument:
            await self._stop_container(id, 0)
            raise

    def stop_container(self, id: str, grace_seconds: int) -> Deferred[Any]:
        return Deferred.fromCoroutine(self._stop_container(id, grace_seconds))

    async def _stop_container(self, id: str, grace: int) -> Any:
        known = await self._view.existing(id)
        if known.state.state != cri.CONTAINER_RUNNING:
            return known.state
        path = f"/containers/{NAME_PREFIX}{id}"
        try:
            if grace:
                await self._engine.call(
                    "POST", path + "/stop", {"t": str(grace)}, within=grace + CALL_SECONDS
                )
            else:
                await self._kill(path)
        except EngineError as error:
            if error.status not in (304, 404, 409):
                raise error.translated(f"stopping container {id}") from error
        return (await self._view.existing(id)).state

    async def _kill(self, path: str) -> None:
        await self._engine.call("POST", path + "/kill", {"signal": "SIGKILL"})
        await self._engine.call("POST", path + "/wait", {"condition": "not-running"})

    def remove(self, id: str) -> Deferred[None]:
        return Deferred.fromCoroutine(self._remove(id))

    async def _remove(self, id: str) -> None:
        path = f"/containers/{NAME_PREFIX}{id}"
        deadline = self._reactor.seconds() + REMOVE_SECONDS
        while True:
            try:
                await self._engine.call("DELETE", path, {"force": "1", "v": "1"})
            except EngineError as error:
                under_way = error.status == 409 and self._reactor.seconds() < deadline
                if error.status != 404 and not under_way:
                    raise error.translated(f"removing container {id}") from error
            if await self._view.refresh(id) is None:
                return
            await deferLater(self._reactor, RETRY_SECONDS[0], lambda: None)

    def update(self, id: str, resources: Any) -> Deferred[Any]:
        return Deferred.fromCoroutine(self._update(id, resources))

    async def _update(self, id: str, limits: Any) -> Any:
        known = await self._view.existing(id)
        cgroups.check(limits)
        body = resources(limits)
        score = body.pop("OomScoreAdj", 0)
        by_hand = bool(known.state.pid) and cgroups.is_v2()
        if body and not by_hand:
            try:
                await self._engine.call("POST", f"/containers/{NAME_PREFIX}{id}/update", body=body)
            except EngineError as error:
                refused = error.translated(f"resources of container {id}")
                # The kernel's refusals (a limit below what is in use) come as a fault of the engine.
                raise InvalidArgument(str(refused)) if error.status == 500 else refused from error
        if known.state.pid:
            cgroups.apply(known.state.pid, limits, every=by_hand)
            if score and score != known.state.resources.oom_score_adj:
                _adjust_oom_score(known.state.pid, score)
        self._limits.put(id, limits)
        return (await self._view.existing(id)).state

    def containers(self) -> Deferred[list[Any]]:
        return Deferred.fromCoroutine(self._containers())

    async def _containers(self) -> list[Any]:
        if not self._view.live:
            await self._view.resync()
        return [known.state for known in self._view.all().values()]

    def usage(self) -> Deferred[list[Any]]:
        known = {id: (one.state, one.traces) for id, one in self._view.all().items()}
        return Deferred.fromCoroutine(self._usages.of(known))

    def exec_sync(
        self, id: str, command: Sequence[str], timeout: float, max_output: int
    ) -> Deferred[ExecResult]:
        return Deferred.fromCoroutine(self._exec_sync(id, command, timeout, max_output))

    async def _exec_sync(self, id: str, command: Sequence[str], within: float, limit: int) -> ExecResult:
        running = exec_sync(self._reactor, self._engine, NAME_PREFIX + id, command, within, limit)
        result: ExecResult = await self._in_running(id, running)
        return result

    def exec_session(self, id: str, command: Sequence[str], streams: Streams) -> Deferred[ISession]:
        opening = exec_session(
            self._reactor, self._engine, self._config.socket, NAME_PREFIX + id, command, streams
        )
        return Deferred.fromCoroutine(self._in_running(id, opening))

    def attach_session(self, id: str, streams: Streams) -> Deferred[ISession]:
        opening = attach_session(self._reactor, self._engine, self._config.socket, NAME_PREFIX + id, streams)
        return Deferred.fromCoroutine(self._in_running(id, opening))

    async def _in_running(self, id: str, work: Any) -> Any:
        """`work` in a running container, Docker's refusals as our errors."""
        try:
            return await work
        except EngineError as error:
            if error.status == 404:
                raise NotFound(f"there is no container {id} in this sandbox's VM") from error
            if error.status == 409:
                raise FailedPrecondition(f"container {id} is not running") from error
            raise error.translated(f"running a command in container {id}") from error

    async def read_log(self, id: str, cursor: str, follow: bool) -> AsyncIterator[Any]:
        known = self._view.get(id) or await self._view.existing(id)
        if not known.log_path:
            known = await self._view.existing(id)
        log = JsonLog(Path(known.log_path), cursor) if known.log_path else None
        while log is None:
            # Docker names the log when the container is first started.
            if not follow or self._has_ended(id):
                return
            await deferLater(self._reactor, RETRY_SECONDS[0], lambda: None)
            seen = self._view.get(id)
            log = JsonLog(Path(seen.log_path), cursor) if seen is not None and seen.log_path else None
        reading = records(self._reactor, log, follow, lambda: self._has_ended(id))
        try:
            async for record in reading:
                yield record
        finally:
            await reading.aclose()  # type: ignore[attr-defined]

    def _has_ended(self, id: str) -> bool:
        known = self._view.get(id)
        return known is None or known.has_ended

    # Images

    def missing_layers(self, diff_ids: Sequence[str]) -> Deferred[int]:
        return Deferred.fromCoroutine(
            self._translating(self._images.missing_layers(diff_ids), "listing images")
        )

    def load_image(self, image_id: str, archive: AsyncIterator[bytes]) -> Deferred[None]:
        return Deferred.fromCoroutine(self._images.load(image_id, archive))

    def images(self) -> Deferred[list[str]]:
        return Deferred.fromCoroutine(self._translating(self._images.ids(), "listing images"))

    def remove_image(self, image_id: str) -> Deferred[None]:
        return Deferred.fromCoroutine(self._remove_image(image_id))

    async def _remove_image(self, image_id: str) -> None:
        await self._translating(self._image_volumes.release(image_id), f"removing image {image_id}")
        await self._images.remove(image_id)

    async def _translating(self, work: Any, what: str) -> Any:
        try:
            return await work
        except EngineError as error:
            raise error.translated(what) from error


async def _nothing() -> None:
    """The sandbox's files are the agent's; Docker needs no word of them."""


def _adjust_oom_score(pid: int, score: int) -> None:
    try:
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(score))
    except ProcessLookupError:
        return
    except OSError as error:
        raise InvalidArgument(f"resources.oom_score_adj {score}: {error.strerror}") from error
