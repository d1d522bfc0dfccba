# SPDX-License-Identifier: Apache-2.0
"""One container of the fake provider: its state, which follows from its files, and its life."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from infranetes_common.concurrency import Event, Flight
from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.processes import ProcessEnd, kill_family, start_ticks
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from infranetes_simulation.containers.files import Exited, Files, Record, Running
from infranetes_simulation.containers.shim_process import start_shim
from vmserver.containers.resources import merge

_NEVER_NEGATIVE = ("cpu_period", "cpu_shares", "memory_limit_in_bytes")


class Container:
    """Starts, stops and follows one container.

    :param changed: called after each change of its state, which is saved by then.
    :ivar over: happens once it has ended. :ivar shim: its shim's pid; 0: it has none yet.
    """

    def __init__(
        self, reactor: IReactor, files: Files, record: Record, changed: Callable[[Container], None]
    ) -> None:
        self.record = record
        self.over: Event[None] = Event()
        self.shim = 0
        self._reactor = reactor
        self._files = files
        self._changed = changed
        self._shim_end: ProcessEnd | None = None
        self._starting: Flight[None] | None = None
        if self.exited:
            self.over.succeed(None)

    @property
    def id(self) -> str:
        return self.record.state.id

    @property
    def running(self) -> bool:
        return self.record.state.state == cri.CONTAINER_RUNNING

    @property
    def exited(self) -> bool:
        return self.record.state.state == cri.CONTAINER_EXITED

    def snapshot(self) -> messages.ContainerState:
        """Return a copy of its state."""
        state = messages.ContainerState()
        state.CopyFrom(self.record.state)
        return state

    def _save(self) -> None:
        self._files.save(self.record)
        self._changed(self)
        if self.exited:
            self.over.succeed(None)

    # Following its files

    def refresh(self) -> None:
        """Bring the state up to what the files say, and follow the shim if it lives."""
        if not self.record.argv:
            return
        exited = self._files.exited(self.id)
        running = self._files.running(self.id)
        if exited is None and running is not None:
            if start_ticks(running["shim"]) == running["ticks"] and self._follow(running):
                return
            exited = self._files.exited(self.id)  # it may have ended between the two
            if exited is None:
                kill_family(running["pid"])
                exited = Exited(
                    exit_code=137,
                    started_at=running["started_at"],
                    finished_at=time.time_ns(),
                    error="the process that watched over it was killed",
                )
                self._files.save_exited(self.id, exited)
        if exited is not None:
            self._set_exited(exited)

    def _follow(self, running: Running) -> bool:
        try:
            if self._shim_end is None:
                self._shim_end = ProcessEnd(self._reactor, running["shim"], self._shim_ended)
        except ProcessLookupError:
            return False
        self.shim = running["shim"]
        if not self.running:
            state = self.record.state
            state.state = cri.CONTAINER_RUNNING
            state.started_at = running["started_at"]
            state.pid = running["pid"]
            self._save()
        return True

    def _shim_ended(self) -> None:
        self._shim_end = None
        self.refresh()

    def unfollow(self) -> None:
        """Stop following the shim. Idempotent."""
        if self._shim_end is not None:
            self._shim_end.close()
            self._shim_end = None

    def _set_exited(self, exited: Exited) -> None:
        state = self.record.state
        if self.exited:
            return
        state.state = cri.CONTAINER_EXITED
        state.started_at = exited["started_at"]
        state.finished_at = exited["finished_at"]
        state.exit_code = exited["exit_code"]
        state.message = exited["error"]
        state.pid = 0
        if exited["error"] and state.exit_code in (126, 127):
            state.reason = "ContainerCannotRun"
        else:
            state.reason = "Error" if state.exit_code else "Completed"
        self._save()

    # Its life

    async def start(self) -> None:
        """Start it; see `IContainerProvider.start_container`."""
        state = self.record.state
        if self.exited:
            raise FailedPrecondition(f"container {self.id} has ended ({state.reason}); make another one")
        if self.running:
            return
        if not self.record.argv:
            state.state = cri.CONTAINER_RUNNING
            state.started_at = time.time_ns()
            self._save()
            return
        if self._starting is None or self._starting.done:
            self._starting = Flight(self._start_shim())
        await self._starting.join()
        if state.reason == "ContainerCannotRun":
            raise InvalidArgument(f"container {self.id} can't be started: {state.message}")

    async def _start_shim(self) -> None:
        await start_shim(self._reactor, self._files.directory, self.id)
        self.refresh()
        if not self.running and not self.exited:
            now = time.time_ns()
            exited = Exited(
                exit_code=128, started_at=now, finished_at=now, error="its shim could not be started"
            )
            self._files.save_exited(self.id, exited)
            self._set_exited(exited)

    async def started(self) -> None:
        """Return once a start that is under way has ended."""
        if self._starting is not None:
            await self._starting.join()

    async def stop(self, grace: int) -> None:
        """Stop it; see `IContainerProvider.stop_container`."""
        if not self.running:
            return
        if self.record.argv:
            await self._kill(grace)
            return
        self._set_exited(
            Exited(
                exit_code=0 if grace else 137,
                started_at=self.record.state.started_at,
                finished_at=time.time_ns(),
                error="",
            )
        )

    async def _kill(self, grace: int) -> None:
        pid = self.record.state.pid
        if not grace:
            kill_family(pid)
            await self.over.wait()
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, self.record.signal)
        timer = self._reactor.callLater(grace, kill_family, pid)
        try:
            await self.over.wait()
        finally:
            if timer.active():
                timer.cancel()

    def update(self, resources: cri.LinuxContainerResources) -> None:
        """Record new limits; see `IContainerProvider.update`."""
        before = self.snapshot()
        limits = self.record.state.resources
        for field, value in resources.ListFields():
            if isinstance(value, int) and value < 0 and field.name in _NEVER_NEGATIVE:
                raise InvalidArgument(f"resources.{field.name} {value}: expected 0 or more")
        merge(limits, resources)
        if self.record.state != before:
            self._save()
