# SPDX-License-Identifier: Apache-2.0
"""The agents' reports of containers, and how they change the containers' records.

A report is a vmserver.ContainerState. Reports of a container arrive as answers to its calls and in its
agent's stream, in any order; one that is older than the container's record changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
from twisted.internet.defer import Deferred, succeed
from twisted.logger import Logger

from infranetes.pods.node.context import NodeContext
from infranetes.pods.node.inventory import Container
from infranetes.pods.node.logs import wait_while_advancing
from infranetes.pods.node.pinning import pin_later
from infranetes.pods.store.records import ContainerRecord
from infranetes.pods.store.states import ALIVE, ContainerState
from infranetes_common.concurrency import Flight
from infranetes_common.errors import DeadlineExceeded, InfranetesError
from infranetes_common.wire import cri, vmserver

KILLED = 137  # the exit code of a process that SIGKILL ended, or whose machine is gone
UNWRITTEN_REASON = "VolumesNotWritten"
GONE_REASON = "ContainerLost"
NEVER_RAN = ("ContainerCannotRun", "StartError")  # reasons of containers that end without having started
LOG_SECONDS = 10.0  # how long a container's end waits for a log that does not advance
LACKING = "its log is not complete: it says where lines are missing"

_STATES = {
    cri.CONTAINER_CREATED: ContainerState.CREATED,
    cri.CONTAINER_RUNNING: ContainerState.RUNNING,
    cri.CONTAINER_EXITED: ContainerState.EXITED,
}
_ORDER = [
    ContainerState.CREATING,
    ContainerState.CREATED,
    ContainerState.STARTING,
    ContainerState.RUNNING,
    ContainerState.EXITED,
    ContainerState.REMOVING,
]

Until = Callable[[], float] | None
"""Returns the time of the clock until which a caller waits; None: nobody has said."""

_log = Logger()


def apply_report(node: NodeContext, container: Container, report: vmserver.ContainerState) -> None:
    """Apply the agent's report to the container's record.

    While the container's creation is under way the report is ignored, and while its start is, it is held. An
    end is recorded once the container's log and its writes to volumes are on the node; until then the
    container is RUNNING, however soon it ended.
    """
    state = _STATES.get(report.state)
    if state is None or container.state is ContainerState.REMOVING or container.being_created:
        return
    if container.starting is not None:
        hold_report(container, report)
        return
    if _ORDER.index(state) < _ORDER.index(container.state):
        return
    if state is ContainerState.EXITED and container.state in ALIVE and report.reason not in NEVER_RAN:
        if container.exit_report is not None:  # the end was reported before, and is recorded soon
            return
        record_start(node, container, report)
        # The output comes first: clients read the termination message and the log once they learn of the end.
        container.exit_report = report
        collect_output(node, container).addBoth(lambda _: record_exit(node, container, report))
        return
    if state is ContainerState.RUNNING:
        record_start(node, container, report)
    elif state is ContainerState.EXITED:
        record_exit(node, container, report)
    else:
        _record_creation(node, container, report)


def hold_report(container: Container, report: vmserver.ContainerState) -> None:
    """Keep the report until the container's start is over; of several the latest counts."""
    if container.held_report is None or _rank(report) >= _rank(container.held_report):
        container.held_report = report


def record_start(node: NodeContext, container: Container, report: vmserver.ContainerState) -> Deferred[None]:
    """Make the container RUNNING, unless it has ended. Fires once that is on the disk."""
    _record_creation(node, container, report)
    record = container.record
    if record.state in (ContainerState.CREATED, ContainerState.STARTING):
        record = record.to(ContainerState.RUNNING)
    if record.state is ContainerState.RUNNING and not record.started_at:
        record = attrs.evolve(record, started_at=report.started_at or node.now())
    written = _save(node, container, record)
    if container.state is ContainerState.RUNNING:
        node.logs.ensure(container)
    return written


def record_exit(node: NodeContext, container: Container, report: vmserver.ContainerState) -> Deferred[None]:
    """Make the container EXITED, without waiting for its log or volumes.

    It is EXITED once its record is on the disk, so that no later daemon shows another state; fires then.
    """
    _record_creation(node, container, report)
    if container.recording_exit is None:
        container.exit_report = report
        container.recording_exit = Flight(_record_exit(node, container, report))
    return container.recording_exit.join()


async def _record_exit(node: NodeContext, container: Container, report: vmserver.ContainerState) -> None:
    if container.state in ALIVE:
        started_at = container.record.started_at or report.started_at
        record = container.record.to(
            ContainerState.EXITED,
            started_at=started_at,
            finished_at=max(report.finished_at or node.now(), started_at),
            exit_code=report.exit_code,
            reason=_reason(container, report),
            message="; ".join(filter(None, [report.message, container.unwritten, container.unlogged])),
        )
        try:
            await node.store.put_container(record)
        except InfranetesError as error:
            _log.error("the end of container {container} was not recorded: {error}",
                       container=container.id, error=error)  # fmt: skip
        if container.state in ALIVE:
            container.record = record
            pin_later(container.sandbox)
            node.features.ended(container)
    if container.state is ContainerState.EXITED:
        node.logs.ensure(container)


def _reason(container: Container, report: vmserver.ContainerState) -> str:
    if report.reason and report.reason not in ("Completed", "Error"):
        return report.reason
    if container.unwritten:
        return UNWRITTEN_REASON
    return "Completed" if report.exit_code == 0 else "Error"


def _record_creation(node: NodeContext, container: Container, report: vmserver.ContainerState) -> None:
    """Make a CREATING container CREATED: an earlier daemon asked for it and never learnt that it exists."""
    if container.state is ContainerState.REMOVING:
        return
    container.reported = report
    container.cache.clear()
    record = container.record
    if record.state is ContainerState.CREATING:
        record = record.to(ContainerState.CREATED, created_at=report.created_at or record.created_at)
        node.inventory.note(_save(node, container, record), f"container {container.id}")


def _save(node: NodeContext, container: Container, record: ContainerRecord) -> Deferred[None]:
    return node.inventory.save_container(container, record) if record != container.record else succeed(None)


def _rank(report: vmserver.ContainerState) -> int:
    state = _STATES.get(report.state)
    return -1 if state is None else _ORDER.index(state)


def collect_output(node: NodeContext, container: Container) -> Deferred[None]:
    """Bring an ended container's volumes and log to the node, as far as time allows."""
    if container.collecting is None:
        container.collecting = Flight(_collect_output(node, container))
    return container.collecting.join()


async def _collect_output(node: NodeContext, container: Container) -> None:
    await _write_back(node, container)
    node.logs.ensure(container)
    await _wait_for_output(node, container, LOG_SECONDS, node.logs.drain(container))
    if container.pump is not None and container.pump.log.lacking:
        container.unlogged = LACKING


async def _write_back(node: NodeContext, container: Container) -> None:
    container.unwritten = await node.features.collect(container)


async def _wait_for_output(
    node: NodeContext, container: Container, seconds: float, output: Deferred[None], until: Until = None
) -> None:
    try:
        await wait_while_advancing(node.clock, container, output, seconds, until)
    except DeadlineExceeded as error:
        _log.warn("the end of container {container} is reported before its log is complete: {error}",
                  container=container.id, error=error)  # fmt: skip
        container.unlogged = "its log is not complete: it was not read to its end in time"
        if container.pump is not None:
            container.pump.say("the container's end is told before its log was read to its end")


async def apply_stop(
    node: NodeContext,
    container: Container,
    report: vmserver.ContainerState,
    seconds: float,
    until: Until = None,
) -> None:
    """Apply the report of a stopped container.

    :param seconds: how long to wait for a log that does not advance. :param until: see
        `wait_while_advancing`."""
    apply_report(node, container, report)
    if container.exit_report is None:
        return
    await _write_back(node, container)
    await _wait_for_output(node, container, seconds, collect_output(node, container), until)
    await record_exit(node, container, report)


def end_log(node: NodeContext, container: Container, why: str) -> None:
    """Stop writing the container's log, because no more output will come; if some is missing, say so."""
    if node.logs.abort(container, why) and container.state is ContainerState.EXITED:
        message = "; ".join(filter(None, [container.record.message, LACKING]))
        record = attrs.evolve(container.record, message=message)
        node.inventory.note(node.inventory.save_container(container, record), f"container {container.id}")


def record_loss(node: NodeContext, container: Container, reason: str, message: str) -> None:
    """Record the end of a container whose agent can't report it. Does nothing if the container has ended."""
    if container.state not in ALIVE:
        return
    if container.exit_report is not None:  # the agent did report the end, a moment ago
        record_exit(node, container, container.exit_report)
        return
    if container.state is ContainerState.RUNNING:
        message = "; ".join(filter(None, [message, node.features.unwritten(container)]))
    now = max(node.now(), container.record.started_at)
    record = container.record.to(
        ContainerState.EXITED, finished_at=now, exit_code=KILLED, reason=reason, message=message
    )
    node.inventory.note(node.inventory.save_container(container, record), f"container {container.id}")
