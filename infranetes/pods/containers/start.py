# SPDX-License-Identifier: Apache-2.0
"""StartContainer: run a container once in its life, even if the agent's answer is lost."""

from __future__ import annotations

from twisted.logger import Logger

from infranetes.machines.interface import IAgent
from infranetes.pods.node.context import NodeContext
from infranetes.pods.node.inventory import Container
from infranetes.pods.store.states import ContainerState
from infranetes.pods.vm.reports import (
    GONE_REASON,
    NEVER_RAN,
    apply_report,
    collect_output,
    hold_report,
    record_exit,
    record_loss,
    record_start,
)
from infranetes_common.concurrency import Event, shielded
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    NotFound,
    Unavailable,
)
from infranetes_common.wire import cri

START_ERROR = 128  # the exit code that tells kubelet that a container could not be started

_log = Logger()


async def start_container(node: NodeContext, container: Container) -> None:
    """Run the container. Its record is RUNNING, in memory and on the disk, before this returns.

    Cancelling does not stop the start. If the answer to an earlier start was lost, the agent is asked again;
    it runs the container only if that has not run yet.

    :raise FailedPrecondition: the container runs, is being started, has ended, or is being removed.
    :raise Unavailable: the agent's answer was lost: the container may run.
    :raise InfranetesError: the container can't be run, and has ended."""
    if not _is_startable(container):
        raise FailedPrecondition(f"container {container.id} {_why_not_startable(container)}")
    container.sandbox.check_stays()
    await shielded(_start_noted(node, container, container.sandbox.agent()))


async def wait_started(container: Container) -> None:
    """Wait until the container's start is over, if one is under way."""
    if container.starting is not None:
        await container.starting.wait()


async def _start_noted(node: NodeContext, container: Container, agent: IAgent) -> None:
    timeline, name = container.sandbox.timeline, container.config.metadata.name
    with timeline.step("the container is started", container=name):
        await _start(node, container, agent)


async def _start(node: NodeContext, container: Container, agent: IAgent) -> None:
    container.starting = over = Event[None]()
    container.requested_at = node.clock.seconds()
    try:
        await node.features.before_start(container)
        first = container.state is ContainerState.CREATED
        if first:
            await node.store.put_container(container.record.to(ContainerState.STARTING))
            if container.state is ContainerState.CREATED:
                container.record = container.record.to(ContainerState.STARTING)
        if container.state is not ContainerState.STARTING:
            raise FailedPrecondition(f"container {container.id} {_why_not_startable(container)}")
        try:
            if first:
                await node.logs.prepare(container)
            report = await agent.start(container.id)
        except InfranetesError as error:
            if not _may_have_reached_the_agent(error):
                await _record_failed_start(node, container, agent, str(error))
            raise
        if container.state is not ContainerState.STARTING:
            raise Unavailable(f"container {container.id} ended with its VM while it was started")
        try:
            await record_start(node, container, report)
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
            apply_report(node, container, held)
        over.succeed(None)


async def _record_failed_start(node: NodeContext, container: Container, agent: IAgent, message: str) -> None:
    """Make sure that a container whose start failed does not run, and record its end.
    If the agent does not answer nothing is recorded: the container may run."""
    try:
        report = await agent.stop(container.id, 0)
    except NotFound:
        record_loss(node, container, GONE_REASON, "its VM no longer knows this container")
        return
    except InfranetesError as error:
        _log.warn("it is not known whether container {container}, whose start failed, runs: {error}",
                  container=container.id, error=error)  # fmt: skip
        return
    if container.start_unconfirmed and report.state == cri.CONTAINER_EXITED:
        hold_report(container, report)  # the start whose answer was lost did run it
        return
    if report.state != cri.CONTAINER_EXITED:
        now = node.now()
        report.state, report.started_at, report.finished_at = cri.CONTAINER_EXITED, now, now
        report.exit_code, report.reason, report.message = START_ERROR, "StartError", message
    if report.reason not in NEVER_RAN:
        await collect_output(node, container)
    await record_exit(node, container, report)


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
