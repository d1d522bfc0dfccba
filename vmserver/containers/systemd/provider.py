"""See the package's docstring: `view` knows the containers, this changes them."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, TimeoutError, fail, succeed
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger
from zope.interface import implementer

from infranetes_common import cri
from infranetes_common import vmserver as messages
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from vmserver.containers.fake.execs import exec_sync
from vmserver.containers.fake.sessions import ExecSession
from vmserver.containers.interface import ExecResult, IContainerProvider, IImageFetcher, ISession, Streams
from vmserver.containers.journal import Journal
from vmserver.containers.systemd import logs, units
from vmserver.containers.systemd import state as states
from vmserver.containers.systemd.bus import CONNECT_SECONDS
from vmserver.containers.systemd.config import SystemdConfig
from vmserver.containers.systemd.enter import entering
from vmserver.containers.systemd.images import Executables
from vmserver.containers.systemd.known import Known
from vmserver.containers.systemd.manager import RETRY_SECONDS
from vmserver.containers.systemd.programs import CannotRun, Located, locate
from vmserver.containers.systemd.records import Record
from vmserver.containers.systemd.sessions import Attached
from vmserver.containers.systemd.starting import begin
from vmserver.containers.systemd.view import View
from vmserver.stats import container as stats

START_SECONDS = 120.0

_log = Logger()


@implementer(IContainerProvider, IImageFetcher)
class SystemdProvider:
    """See `IContainerProvider`.

    :param directory: where the records are; made when it is first needed.
    :param endpoint: where systemd is, in the place of the configured socket.
    :param outside: the number that a process has here which systemd numbers so.
    """

    name = "systemd"

    def __init__(
        self,
        reactor: Any,
        config: SystemdConfig,
        directory: Path,
        endpoint: IStreamClientEndpoint | None = None,
        outside: Callable[[int], int] = lambda pid: pid,
    ) -> None:
        self._reactor = reactor
        self._config = config
        self._directory = directory
        reached: Any = endpoint or UNIXClientEndpoint(reactor, str(config.socket), CONNECT_SECONDS)
        self._outside = outside
        self._journal = Journal(reactor, config.journalctl, config.journal_dir)
        self._images = Executables(reactor, config)
        self._view = View(reactor, reached, directory, self._journal, self._located, outside)
        self._systemd = self._view.systemd

    # Life

    def start(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self._start())

    async def _start(self) -> None:
        self._view.load()
        self._images.start()
        await self._systemd.start()

    def stop(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        self._view.stop()

    def watch(self, changed: Callable[[Any], None], removed: Callable[[str], None]) -> None:
        self._view.watch(changed, removed)

    def configure(self, sandbox_config: Any) -> Deferred[None]:
        return succeed(None)

    # Containers

    def create(self, id: str, image_id: str, config: Any, sandbox_config: Any) -> Deferred[Any]:
        return Deferred.fromCoroutine(self._create(id, image_id, config))

    async def _create(self, id: str, image_id: str, config: Any) -> Any:
        known = self._view.get(id)
        if known is None:
            if not self._images.has(image_id):
                raise FailedPrecondition(f"image {image_id} is not loaded; load it first")
            units.check(config, os.path.exists)
            state = messages.ContainerState(
                id=id, state=cri.CONTAINER_CREATED, created_at=time.time_ns(), image_id=image_id
            )
            state.resources.CopyFrom(config.linux.resources)
            known = self._view.add(Record(state, config, log=f"{id}.{secrets.token_hex(8)}"))
        return known.state()

    def start_container(self, id: str) -> Deferred[Any]:
        return Deferred.fromCoroutine(self._start_container(id))

    async def _start_container(self, id: str) -> Any:
        known = self._view.existing(id)
        await known.lock.acquire()
        try:
            if known.record.state.state == cri.CONTAINER_CREATED:
                await self._begin(known)
                state = known.record.state
                if state.state == cri.CONTAINER_EXITED and state.reason in (states.CANNOT_RUN, "StartError"):
                    kind = InvalidArgument if state.reason == states.CANNOT_RUN else FailedPrecondition
                    raise kind(f"container {id} can't be started: {state.message}")
                return known.state()
        finally:
            known.lock.release()
        if known.gone:
            raise NotFound(f"there is no container {id} in this sandbox's VM")
        if known.record.state.state == cri.CONTAINER_EXITED:
            reason = known.record.state.reason
            raise FailedPrecondition(f"container {id} has ended ({reason}); make another one")
        return known.state()

    def _located(self, record: Record) -> Located | CannotRun:
        config = record.config
        words = units.argv(config, self._images.path(record.state.image_id))
        return locate(words, units.environment(config), config.working_dir, config.mounts)

    async def _begin(self, known: Known) -> None:
        """Start its unit unless an earlier agent has; answers when it runs, has ended, or can't run."""
        await self._view.look(known)
        if known.record.state.state != cri.CONTAINER_CREATED:
            return
        located = self._located(known.record)
        if isinstance(located, CannotRun):
            states.cannot_run(known.record.state, located.code, str(located), time.time_ns())
            known.record.state.finished_at = known.record.state.started_at
            self._view.changed(known)
            return
        await begin(self._systemd, self._directory, known.record, located, self._config.tasks_max)
        deadline = self._reactor.seconds() + START_SECONDS
        while known.record.state.state == cri.CONTAINER_CREATED:
            if self._reactor.seconds() > deadline:
                raise Unavailable(
                    f"systemd does not come to an end of starting container {known.record.state.id}"
                )
            await deferLater(self._reactor, 0.01, lambda: None)
            await self._view.look(known)

    def stop_container(self, id: str, grace_seconds: int) -> Deferred[Any]:
        return Deferred.fromCoroutine(self._stop_container(id, grace_seconds))

    async def _stop_container(self, id: str, grace: int) -> Any:
        known = self._view.existing(id)
        if known.record.state.state == cri.CONTAINER_RUNNING:
            unit = units.unit_name(id)
            over = known.when_over()
            if grace:
                await self._systemd.call(
                    "KillUnit", "ssi", (unit, "main", units.stop_signal(known.record.config))
                )
                over.addTimeout(grace, self._reactor)
                with contextlib.suppress(TimeoutError):
                    await over
            if not known.over:
                await self._kill(unit)
                ending = known.when_over()
                ending.addTimeout(START_SECONDS, self._reactor)
                await self._view.refresh(known)
                try:
                    await ending
                except TimeoutError:
                    raise Unavailable(f"container {id} does not end, though it was killed") from None
        return known.state()

    async def _kill(self, unit: str) -> None:
        """The main process first; systemd may fail at one that is just coming or going beside it."""
        try:
            await self._systemd.call("KillUnit", "ssi", (unit, "all", int(signal.SIGKILL)))
        except Unavailable as error:
            _log.info("{unit}: {error}", unit=unit, error=error)
            await self._systemd.call("KillUnit", "ssi", (unit, "main", int(signal.SIGKILL)))

    def remove(self, id: str) -> Deferred[None]:
        return Deferred.fromCoroutine(self._remove(id))

    async def _remove(self, id: str) -> None:
        known = self._view.get(id)
        if known is None:
            return
        await self._view.refresh(known)
        if known.record.state.state == cri.CONTAINER_RUNNING:
            await self._stop_container(id, 0)
        await known.lock.acquire()
        try:
            if known.gone:
                return
            await self._systemd.clean(units.unit_name(id))
            self._view.forget(known)
        finally:
            known.lock.release()
        self._view.removed(known)

    def update(self, id: str, resources: Any) -> Deferred[Any]:
        return Deferred.fromCoroutine(self._update(id, resources))

    async def _update(self, id: str, resources: Any) -> Any:
        known = self._view.existing(id)
        merged = cri.LinuxContainerResources()
        merged.CopyFrom(known.record.state.resources)
        for field in ("hugepage_limits", "unified"):
            if getattr(resources, field):
                merged.ClearField(field)
        merged.MergeFrom(resources)
        wanted = units.limits(merged)
        if known.record.state.state == cri.CONTAINER_RUNNING and wanted:
            await self._systemd.limit(units.unit_name(id), wanted)
        await known.lock.acquire()
        try:
            if known.record.state.resources != merged:
                known.record.state.resources.CopyFrom(merged)
                known.record.config.linux.resources.CopyFrom(merged)
                self._view.changed(known)
        finally:
            known.lock.release()
        return known.state()

    def containers(self) -> Deferred[list[Any]]:
        return Deferred.fromCoroutine(self._containers())

    async def _containers(self) -> list[Any]:
        self._systemd.check()  # a view that does not follow systemd is not answered from
        return [known.state() for known in self._view.all()]

    def usage(self) -> Deferred[list[Any]]:
        known = [(each.state(), self._outside(each.record.state.pid)) for each in self._view.all()]
        pool = self._reactor.getThreadPool()
        measured: Deferred[list[Any]] = deferToThreadPool(self._reactor, pool, _thd_measure, known)
        return measured

    # Commands and streams

    def exec_sync(
        self, id: str, command: Sequence[str], timeout: float, max_output: int
    ) -> Deferred[ExecResult]:
        return Deferred.fromCoroutine(self._exec_sync(id, command, timeout, max_output))

    async def _exec_sync(self, id: str, command: Sequence[str], within: float, limit: int) -> ExecResult:
        words, env = self._entering(id, command)
        return await exec_sync(self._reactor, words, env, "/", within, limit)

    def _entering(self, id: str, command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        known = self._view.running(id)
        config = known.record.config
        try:
            pid = self._outside(known.record.state.pid)
            return entering(pid, config, command), units.environment(config)
        except ProcessLookupError:
            raise FailedPrecondition(f"container {id} has just ended") from None

    def exec_session(self, id: str, command: Sequence[str], streams: Streams) -> Deferred[ISession]:
        return Deferred.fromCoroutine(self._exec_session(id, command, streams))

    async def _exec_session(self, id: str, command: Sequence[str], streams: Streams) -> ISession:
        words, env = self._entering(id, command)
        session: ISession = ExecSession.spawn(self._reactor, words, env, "/", streams)
        return session

    def attach_session(self, id: str, streams: Streams) -> Deferred[ISession]:
        return Deferred.fromCoroutine(self._attach_session(id, streams))

    async def _attach_session(self, id: str, streams: Streams) -> ISession:
        known = self._view.running(id)
        config = known.record.config
        now = time.time_ns()
        session: ISession = Attached(
            self._reactor,
            logs.records(self._reactor, self._journal, known.record.log, "", True, known.when_over(), now),
            now,
            streams,
            self._directory / f"{id}.stdin" if config.stdin else None,
            lambda: known.record.state.exit_code,
            (lambda: self._end_stdin(known)) if config.stdin_once else (lambda: None),
        )
        return session

    def _end_stdin(self, known: Known) -> None:
        ending = Deferred.fromCoroutine(self._let_stdin_go(known.record.logger))
        ending.addErrback(lambda failure: _log.error("stdin stays open: {error}", error=failure.value))

    async def _let_stdin_go(self, unit: str) -> None:
        until = self._reactor.seconds() + START_SECONDS
        while (found := await self._systemd.properties(unit)) is not None:
            if found[0]["ActiveState"] != "activating":  # it has its signals in hand
                await self._systemd.call("KillUnit", "ssi", (unit, "main", int(signal.SIGUSR1)))
                return
            if self._reactor.seconds() > until:
                raise Unavailable(f"{unit} does not get ready")
            await deferLater(self._reactor, RETRY_SECONDS[0], lambda: None)

    async def read_log(self, id: str, cursor: str, follow: bool) -> AsyncIterator[Any]:
        known = self._view.existing(id)
        finished = known.when_over()
        reading = logs.records(self._reactor, self._journal, known.record.log, cursor, follow, finished)
        try:
            async for record in reading:
                yield record
        finally:
            await reading.aclose()  # type: ignore[attr-defined]

    # Images

    def missing_layers(self, diff_ids: Sequence[str]) -> Deferred[int]:
        return succeed(len(diff_ids))

    def load_image(self, image_id: str, archive: AsyncIterator[bytes]) -> Deferred[None]:
        return Deferred.fromCoroutine(self._load_image(image_id, archive))

    async def _load_image(self, image_id: str, archive: AsyncIterator[bytes]) -> None:
        if self._images.has(image_id):
            async for _ in archive:
                pass
            return
        await self._images.take(image_id, archive)

    def fetch_image(self, image_id: str, url: str) -> Deferred[None]:
        return Deferred.fromCoroutine(self._images.fetch(image_id, url))

    def images(self) -> Deferred[list[str]]:
        return succeed(self._images.list())

    def remove_image(self, image_id: str) -> Deferred[None]:
        if any(known.record.state.image_id == image_id for known in self._view.all()):
            return fail(FailedPrecondition(f"image {image_id} is in use; remove its containers first"))
        self._images.remove(image_id)
        return succeed(None)


def _thd_measure(known: Sequence[tuple[Any, int]]) -> list[Any]:
    found = []
    for state, pid in known:
        usage = None
        if state.state == cri.CONTAINER_RUNNING and pid:
            usage = stats.usage(pid, state.resources.memory_limit_in_bytes, units.UNIT_PREFIX + state.id)
        found.append(messages.ContainerUsage(id=state.id, started_at=state.started_at, usage=usage))
    return found
