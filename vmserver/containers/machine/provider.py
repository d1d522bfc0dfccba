"""See the package's docstring.

What is true of the container is in one file of this process, on the machine's disk: a machine that starts
again is the same container, still running.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred, DeferredLock, fail, succeed
from twisted.internet.utils import getProcessOutputAndValue
from twisted.logger import Logger
from zope.interface import implementer

from infranetes_common import cri
from infranetes_common import vmserver as messages
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound
from vmserver.containers.fake.execs import exec_sync
from vmserver.containers.fake.provider import DEFAULT_PATH
from vmserver.containers.fake.sessions import AttachSession, ExecSession
from vmserver.containers.interface import ExecResult, IContainerProvider, ISession, Streams
from vmserver.containers.journal import Journal
from vmserver.containers.machine import log as logs
from vmserver.containers.machine import mounts
from vmserver.containers.systemd import records
from vmserver.containers.systemd.records import Record
from vmserver.stats import machine as stats

_log = Logger()


@attrs.frozen
class MachineConfig:
    """`[providers.machine]`"""

    state_dir: Path = Path("/var/lib/vmserver/machine")  # over restarts of the machine
    journalctl: str = "journalctl"  # the program
    journal_dir: Path | None = None  # the journal's files; unless given, the machine's own journal
    stop_command: tuple[str, ...] = ("systemctl", "--no-block", "poweroff")  # ends what runs, and the machine
    kill_command: tuple[str, ...] = ("systemctl", "--no-block", "--force", "poweroff")  # without any grace


@implementer(IContainerProvider)
class MachineProvider:
    """See `IContainerProvider`."""

    name = "machine"

    def __init__(self, reactor: Any, config: MachineConfig) -> None:
        self._reactor = reactor
        self._config = config
        self._journal = Journal(reactor, config.journalctl, config.journal_dir)
        self._lock = DeferredLock()
        self._record: Record | None = None
        self._finished: list[Deferred[None]] = []
        self._watchers: list[tuple[Callable[[Any], None], Callable[[str], None]]] = []

    # Life

    def start(self) -> Deferred[None]:
        directory = self._config.state_dir
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = records.load(directory)
        except (OSError, ValueError) as error:
            return fail(FailedPrecondition(f"the state directory {directory} can't be used: {error}"))
        if found and self._record is None:
            self._record = found[0]
            if self._record.state.state == cri.CONTAINER_RUNNING:
                # The machine may have been started anew.
                return Deferred.fromCoroutine(mounts.put(self._reactor, self._mounts(self._record)))
        return succeed(None)

    def stop(self) -> Deferred[None]:
        return succeed(None)

    def watch(self, changed: Callable[[Any], None], removed: Callable[[str], None]) -> None:
        self._watchers.append((changed, removed))

    def configure(self, sandbox_config: Any) -> Deferred[None]:
        return succeed(None)

    # The container

    def _state(self) -> Any:
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
            self._over()

    def _over(self) -> None:
        waiting, self._finished = self._finished, []
        for one in waiting:
            one.callback(None)

    def _mounts(self, record: Record) -> list[tuple[str, str, bool]]:
        return [(one.host_path, one.container_path, one.readonly) for one in record.config.mounts]

    def create(self, id: str, image_id: str, config: Any, sandbox_config: Any) -> Deferred[Any]:
        return self._lock.run(lambda: Deferred.fromCoroutine(self._create(id, image_id, config)))

    async def _create(self, id: str, image_id: str, config: Any) -> Any:
        if self._record is not None and self._record.state.id == id:
            return self._state()
        if self._record is not None:
            raise FailedPrecondition(
                f"this VM is container {self._record.state.id}: a pod whose image is the VM has one container"
            )
        for field in ("command", "args"):
            if getattr(config, field):
                raise InvalidArgument(
                    f"config.{field}: the image is a whole machine, which runs what it is for; leave it out"
                )
        if config.tty or config.stdin:
            raise InvalidArgument("config.tty, config.stdin: a machine has neither; leave them out")
        wanted = mounts.check(config)
        state = messages.ContainerState(
            id=id, state=cri.CONTAINER_CREATED, created_at=time.time_ns(), image_id=image_id
        )
        state.resources.CopyFrom(config.linux.resources)
        try:
            await mounts.put(self._reactor, wanted)
        except BaseException:
            await mounts.drop(self._reactor, [target for _, target, _ in wanted])
            raise
        self._record = Record(state, config, log=id)
        self._changed()
        return self._state()

    def start_container(self, id: str) -> Deferred[Any]:
        return Deferred.fromCoroutine(self._start_container(id))

    async def _start_container(self, id: str) -> Any:
        record = self._existing(id)
        if record.state.state == cri.CONTAINER_EXITED:
            raise FailedPrecondition(f"container {id} has ended: its VM is being switched off")
        if record.state.state == cri.CONTAINER_CREATED:
            record.state.state = cri.CONTAINER_RUNNING
            record.state.started_at = time.time_ns()
            record.state.pid = 1
            record.state.user.linux.SetInParent()
            self._changed()
        return self._state()

    def stop_container(self, id: str, grace_seconds: int) -> Deferred[Any]:
        return Deferred.fromCoroutine(self._stop_container(id, grace_seconds))

    async def _stop_container(self, id: str, grace: int) -> Any:
        record = self._existing(id)
        if record.state.state == cri.CONTAINER_RUNNING:
            # Told before the machine goes, and the agent with it.
            record.state.state = cri.CONTAINER_EXITED
            record.state.finished_at = time.time_ns()
            record.state.exit_code = 0 if grace else 137
            record.state.reason = "Completed" if grace else "Error"
            record.state.pid = 0
            self._changed()
            command = self._config.stop_command if grace else self._config.kill_command
            await self._run(command)
        return self._state()

    async def _run(self, command: Sequence[str]) -> None:
        environment = {"PATH": DEFAULT_PATH}
        # The shell finds the program in PATH; what it runs is not its to read.
        arguments = ["-c", 'exec "$@"', "sh", *command]
        _, said, code = await getProcessOutputAndValue("/bin/sh", arguments, environment, "/", self._reactor)
        if code:
            _log.error(
                "the machine is not switched off by {command}: {words}; the node ends it",
                command=" ".join(command),
                words=said.decode(errors="replace").strip()[:300],
            )

    def remove(self, id: str) -> Deferred[None]:
        return self._lock.run(lambda: Deferred.fromCoroutine(self._remove(id)))

    async def _remove(self, id: str) -> None:
        record = self._record
        if record is None or record.state.id != id:
            return
        if record.state.state == cri.CONTAINER_RUNNING:
            await self._stop_container(id, 0)
        await mounts.drop(self._reactor, [target for _, target, _ in self._mounts(record)])
        records.forget(self._config.state_dir, id)
        self._record = None
        for _, removed in self._watchers:
            removed(id)
        self._over()

    def update(self, id: str, resources: Any) -> Deferred[Any]:
        return Deferred.fromCoroutine(self._update(id, resources))

    async def _update(self, id: str, resources: Any) -> Any:
        """The machine's size is what it was made with; what is asked for is kept and has no effect."""
        record = self._existing(id)
        for field in ("cpu_period", "cpu_shares", "memory_limit_in_bytes"):
            if getattr(resources, field) < 0:
                raise InvalidArgument(f"resources.{field} {getattr(resources, field)}: expected 0 or more")
        before = self._state()
        record.state.resources.MergeFrom(resources)
        if record.state != before:
            self._changed()
        return self._state()

    def containers(self) -> Deferred[list[Any]]:
        return succeed([self._state()] if self._record is not None else [])

    def usage(self) -> Deferred[list[Any]]:
        """What the machine uses is what the container uses."""
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
        return {"PATH": DEFAULT_PATH, "HOME": "/root", **variables}

    def exec_sync(
        self, id: str, command: Sequence[str], timeout: float, max_output: int
    ) -> Deferred[ExecResult]:
        return Deferred.fromCoroutine(self._exec_sync(id, command, timeout, max_output))

    async def _exec_sync(self, id: str, command: Sequence[str], within: float, limit: int) -> ExecResult:
        record = self._running(id)
        cwd = record.config.working_dir or "/"
        return await exec_sync(self._reactor, command, self._environment(record), cwd, within, limit)

    def exec_session(self, id: str, command: Sequence[str], streams: Streams) -> Deferred[ISession]:
        return Deferred.fromCoroutine(self._exec_session(id, command, streams))

    async def _exec_session(self, id: str, command: Sequence[str], streams: Streams) -> ISession:
        record = self._running(id)
        cwd = record.config.working_dir or "/"
        session: ISession = ExecSession.spawn(self._reactor, command, self._environment(record), cwd, streams)
        return session

    def attach_session(self, id: str, streams: Streams) -> Deferred[ISession]:
        return Deferred.fromCoroutine(self._attach_session(id, streams))

    async def _attach_session(self, id: str, streams: Streams) -> ISession:
        record = self._running(id)
        now = time.time_ns()
        reading = logs.records(self._reactor, self._journal, "", True, self._when_over(), now)
        session: ISession = AttachSession(
            self._reactor, reading, now, streams, None, 0, lambda: record.state.exit_code
        )
        return session

    def _when_over(self) -> Deferred[None]:
        if self._record is None or self._record.state.state == cri.CONTAINER_EXITED:
            return succeed(None)

        def cancelled(one: Deferred[None]) -> None:
            if one in self._finished:
                self._finished.remove(one)

        one: Deferred[None] = Deferred(cancelled)
        self._finished.append(one)
        return one

    async def read_log(self, id: str, cursor: str, follow: bool) -> AsyncIterator[Any]:
        self._existing(id)
        reading = logs.records(self._reactor, self._journal, cursor, follow, self._when_over())
        try:
            async for record in reading:
                yield record
        finally:
            await reading.aclose()  # type: ignore[attr-defined]

    # Images

    def missing_layers(self, diff_ids: Sequence[str]) -> Deferred[int]:
        return succeed(len(diff_ids))

    def load_image(self, image_id: str, archive: AsyncIterator[bytes]) -> Deferred[None]:
        return fail(
            FailedPrecondition("the image of this machine is the machine: set imgprovider on its node")
        )

    def images(self) -> Deferred[list[str]]:
        return succeed([self._record.state.image_id] if self._record is not None else [])

    def remove_image(self, image_id: str) -> Deferred[None]:
        if self._record is not None and self._record.state.image_id == image_id:
            return fail(FailedPrecondition(f"image {image_id} is in use: it is this machine"))
        return succeed(None)
