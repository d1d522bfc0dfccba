# SPDX-License-Identifier: Apache-2.0
"""StopContainer and RemoveContainer: end a container, and forget it once its output is on the node."""

from __future__ import annotations

import contextlib
from functools import partial

import attrs
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.pods.containers.start import START_ERROR, wait_started
from infranetes.pods.images.removal import UnusedImages
from infranetes.pods.node.hooks import Features
from infranetes.pods.node.inventory import Container, Inventory
from infranetes.pods.node.logs import Logs, wait_while_advancing
from infranetes.pods.node.pinning import pin_later
from infranetes.pods.node.times import MACHINE_DRAIN_SECONDS
from infranetes.pods.sandboxes.machine_images import MachineImages
from infranetes.pods.sandboxes.sandboxes import Sandboxes
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.pods.vm.reports import GONE_REASON, ContainerReports, Until
from infranetes_common.concurrency import Flight, shielded, sleep
from infranetes_common.errors import DeadlineExceeded, InfranetesError, NotFound, Unavailable
from infranetes_common.nanoseconds import nanoseconds
from infranetes_common.wire import cri

STOP_DRAIN_SECONDS = 2.0  # how long a stop waits for a log that does not advance
LOOKS = 8  # how many times the provider is asked whether the VM has just ended
LOOK_PAUSE_SECONDS = 0.25

_STARTED = (ContainerState.STARTING, ContainerState.RUNNING)

_log = Logger()


@attrs.frozen(eq=False, repr=False)
class ContainerStop:
    """Stops and removes containers.

    :param drain_seconds: how long a removal waits for a log that does not advance."""

    _clock: IReactorTime
    _inventory: Inventory
    _logs: Logs
    _features: Features
    _drain_seconds: float
    _reports: ContainerReports
    _unused_images: UnusedImages
    _sandboxes: Sandboxes
    _machine_images: MachineImages

    async def stop(self, container: Container, grace_seconds: int, limit: float | None = None) -> None:
        """Stop the container and wait for its end. Wait only for the log if it has ended.

        Does nothing if the container was never started.

        :param limit: the seconds until the caller gives up; None: it does not say."""
        until = None if limit is None else partial(float, self._clock.seconds() + limit)
        await wait_started(container)
        if container.state in _STARTED:
            await shielded(self._stop(container, grace_seconds, STOP_DRAIN_SECONDS, until))
        elif container.state is ContainerState.EXITED:
            await self._drained(container, STOP_DRAIN_SECONDS, until)

    async def _stop(
        self, container: Container, grace_seconds: int, drain_seconds: float, until: Until = None
    ) -> None:
        """Stop the container. :param drain_seconds: how long to wait for a log that does not advance."""
        container.stops += 1
        timeline, name = container.sandbox.timeline, container.config.metadata.name
        try:
            with timeline.step("the container is stopped", f"within {grace_seconds} s", container=name):
                await self._stop_once(container, grace_seconds, drain_seconds, until)
        finally:
            container.stops -= 1

    async def _stop_once(
        self, container: Container, grace_seconds: int, drain_seconds: float, until: Until
    ) -> None:
        try:
            report = await container.sandbox.agent().stop(container.id, grace_seconds)
        except NotFound:
            self._reports.record_loss(container, GONE_REASON, "its VM no longer knows this container")
        except Unavailable:
            if not await self._ended_with_its_vm(container):
                raise
        else:
            if report.state == cri.CONTAINER_CREATED:  # an earlier start never reached the agent
                report.state, report.finished_at = cri.CONTAINER_EXITED, nanoseconds(self._clock)
                report.exit_code, report.reason = START_ERROR, "StartError"
                report.message = "it was stopped before it was run"
            await self._reports.apply_stop(container, report, drain_seconds, until)

    async def _ended_with_its_vm(self, container: Container) -> bool:
        """Return whether the agent was lost because its VM ended.

        The provider needs a moment to notice that, so it is asked several times."""
        for _ in range(LOOKS):
            with contextlib.suppress(InfranetesError):
                await self._sandboxes.look(container.sandbox)
            if container.state not in _STARTED:
                return True
            await sleep(self._clock, LOOK_PAUSE_SECONDS)
        return False

    async def _drained(self, container: Container, seconds: float, until: Until = None) -> bool:
        """Wait for the log, `seconds` if it does not advance; return whether it is complete."""
        try:
            drained = self._logs.drain(container)
            await wait_while_advancing(self._clock, container, drained, seconds, until)
        except DeadlineExceeded:
            return False
        return True

    def removal(self, container: Container) -> Flight[None]:
        """Return the container's removal, beginning it unless it is under way."""
        if container.removing is None or container.removing.done:
            container.removing = Flight(self._remove(container))
        return container.removing

    async def _remove(self, container: Container) -> None:
        container.requested_at = self._clock.seconds()
        await wait_started(container)
        sandbox = container.sandbox
        if sandbox.state is SandboxState.READY and sandbox.record.image:
            await self._remove_machine(container)
        elif sandbox.state is SandboxState.READY:
            await self._remove_from_vm(container)
        elif sandbox.state is SandboxState.STOPPING and sandbox.stopping is not None:
            await sandbox.stopping.join()
        await self._features.release(container)
        self._logs.abort(container, "the container was removed")
        await self._inventory.store.delete_container(container.id)
        self._inventory.discard_container(container)
        pin_later(sandbox)
        self._unused_images.remove_later(sandbox)

    async def _remove_from_vm(self, container: Container) -> None:
        agent = container.sandbox.agent()
        drain_seconds = self._drain_seconds
        if container.state in _STARTED:
            await self._stop(container, 0, drain_seconds)
        elif container.state is ContainerState.EXITED and not await self._drained(container, drain_seconds):
            _log.warn("container {container} is removed before its log was complete",
                      container=container.id)  # fmt: skip
        await self._record_removing(container)
        await agent.remove(container.id)

    async def _remove_machine(self, container: Container) -> None:
        """Remove a container that is the VM. Only the sandbox remains, and may boot another VM."""
        try:
            if container.state in _STARTED:
                await self._stop(container, 0, MACHINE_DRAIN_SECONDS)
            elif container.state is ContainerState.EXITED:
                await self._drained(container, MACHINE_DRAIN_SECONDS)
        except InfranetesError as error:
            _log.info("the VM that is container {container} is ended without its agent: {error}",
                      container=container.id, error=error)  # fmt: skip
        await self._record_removing(container)
        await self._machine_images.vacate(container.sandbox).join()

    async def _record_removing(self, container: Container) -> None:
        record = container.record
        if container.state not in (ContainerState.REMOVING, ContainerState.CREATING):
            record = record.to(ContainerState.REMOVING)
        # Also again: the first write may have failed.
        await self._inventory.save_container(container, record)
