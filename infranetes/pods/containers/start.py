# SPDX-License-Identifier: Apache-2.0
"""StartContainer: run a container once in its life, even if the agent's answer is lost."""

from __future__ import annotations

import attrs
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.machines.interface import IAgent
from infranetes.pods.node.hooks import Features
from infranetes.pods.node.inventory import Container, Inventory
from infranetes.pods.node.logs import Logs
from infranetes.pods.store.states import ContainerState
from infranetes.pods.vm.reports import GONE_REASON, NEVER_RAN, ContainerReports, hold_report
from infranetes_common.concurrency import Event, shielded
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    NotFound,
    Unavailable,
)
from infranetes_common.nanoseconds import nanoseconds
from infranetes_common.wire import cri

START_ERROR = 128  # the exit code that tells kubelet that a container could not be started

_log = Logger()


@attrs.frozen(eq=False, repr=False)
class ContainerStart:
    """Starts containers."""

    _clock: IReactorTime
    _inventory: Inventory
    _logs: Logs
    _features: Features
    _reports: ContainerReports

    async def start(self, container: Container) -> None:
        """Run the container. Its record is RUNNING, in memory and on the disk, before this returns.

        Cancelling does not stop the start. If the answer to an earlier start was lost, the agent is asked
        again; it runs the container only if that has not run yet.

        :raise FailedPrecondition: the container runs, is being started, has ended, or is being removed.
        :raise Unavailable: the agent's answer was lost: the container may run.
        :raise InfranetesError: the container can't be run, and has ended."""
        if not _is_startable(container):
            raise FailedPrecondition(f"container {container.id} {_why_not_startable(container)}")
        container.sandbox.check_stays()
        await shielded(self._start_noted(container, container.sandbox.agent()))

    async def _start_noted(self, container: Container, agent: IAgent) -> None:
        timeline, name = container.sandbox.timeline, container.config.metadata.name
        with timeline.step("the container is started", container=name):
            await self._start_once(container, agent)

    async def _start_once(self, container: Container, agent: IAgent) -> None:
        container.starting = over = Event[None]()
        container.requested_at = self._clock.seconds()
        try:
            await self._features.before_start(container)
            first = container.state is ContainerState.CREATED
            if first:
                await self._inventory.store.put_container(container.record.to(ContainerState.STARTING))
                if container.state is ContainerState.CREATED:
                    container.record = container.record.to(ContainerState.STARTING)
            if container.state is not ContainerState.STARTING:
                raise FailedPrecondition(f"container {container.id} {_why_not_startable(container)}")
            try:
                if first:
                    await self._logs.prepare(container)
                report = await agent.start(container.id)
            except InfranetesError as error:
                if not _may_have_reached_the_agent(error):
                    await self._record_failed_start(container, agent, str(error))
                raise
            if container.state is not ContainerState.STARTING:
                raise Unavailable(f"container {container.id} ended with its VM while it was started")
            try:
                await self._reports.record_start(container, report)
            except InfranetesError as error:
                _log.error("the start of container {container} was not recorded: {error}",
                           container=container.id, error=error)  # fmt: skip
            hold_report(container, report)
        finally:
            held, container.held_report = container.held_report, None
            container.starting = None
            if container.state is ContainerState.STARTING:
                container.start_unconfirmed = True
                container.cache.clear()
            if held is not None:
                self._reports.apply(container, held)
            over.succeed(None)

    async def _record_failed_start(self, container: Container, agent: IAgent, message: str) -> None:
        """Make sure that a container whose start failed does not run, and record its end.
        If the agent does not answer nothing is recorded: the container may run."""
        try:
            report = await agent.stop(container.id, 0)
        except NotFound:
            self._reports.record_loss(container, GONE_REASON, "its VM no longer knows this container")
            return
        except InfranetesError as error:
            _log.warn("it is not known whether container {container}, whose start failed, runs: {error}",
                      container=container.id, error=error)  # fmt: skip
            return
        if container.start_unconfirmed and report.state == cri.CONTAINER_EXITED:
            hold_report(container, report)  # the start whose answer was lost did run it
            return
        if report.state != cri.CONTAINER_EXITED:
            now = nanoseconds(self._clock)
            report.state, report.started_at, report.finished_at = cri.CONTAINER_EXITED, now, now
            report.exit_code, report.reason, report.message = START_ERROR, "StartError", message
        if report.reason not in NEVER_RAN:
            await self._reports.collect_output(container)
        await self._reports.record_exit(container, report)


async def wait_started(container: Container) -> None:
    """Wait until the container's start is over, if one is under way."""
    if container.starting is not None:
        await container.starting.wait()


def _is_startable(container: Container) -> bool:
    """Return whether the container has never run, as far as is known, and no call is about to change that."""
    return (
        container.state in (ContainerState.CREATED, ContainerState.STARTING)
        and container.starting is None
        and container.exit_report is None
        and container.removing is None
        and not container.stops
    )


def _why_not_startable(container: Container) -> str:
    """Return why StartContainer is refused, and what to do instead."""
    if container.removing is not None or container.state is ContainerState.REMOVING:
        return "is being removed: create another attempt"
    if container.state is ContainerState.EXITED:
        return "has ended, and runs once: create another attempt"
    if container.stops or container.exit_report is not None:
        return "is being stopped: create another attempt"
    if container.state is ContainerState.RUNNING:
        return "is running already"
    return "is being started already"


def _may_have_reached_the_agent(error: InfranetesError) -> bool:
    """Return whether the agent may have done what it was asked, or may still do it."""
    return isinstance(error, (Unavailable, DeadlineExceeded)) or type(error) is InfranetesError
