# SPDX-License-Identifier: Apache-2.0
"""The agents' reports of containers, and how they change the containers' records.

A report is a vmserver.ContainerState. Reports of a container arrive as answers to its calls and in its
agent's stream, in any order; one that is older than the container's record changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.pods.node.hooks import Features
from infranetes.pods.node.inventory import Container, Inventory
from infranetes.pods.node.logs import Logs, wait_while_advancing
from infranetes.pods.node.pinning import pin_later
from infranetes.pods.store.records import ContainerRecord
from infranetes.pods.store.states import ALIVE, ContainerState
from infranetes_common.concurrency import Flight
from infranetes_common.errors import DeadlineExceeded, InfranetesError
from infranetes_common.nanoseconds import nanoseconds
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


@attrs.frozen(eq=False, repr=False)
class ContainerReports:
    """Changes containers' records to what their agents report, and records ends that no agent can report."""

    _clock: IReactorTime
    _inventory: Inventory
    _logs: Logs
    _features: Features

    def apply(self, container: Container, report: vmserver.ContainerState) -> None:
        """Apply the agent's report to the container's record.

        While the container's creation is under way the report is ignored, and while its start is, it is held.
        An end is recorded once the container's log and its writes to volumes are on the node; until then the
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
            self.record_start(container, report)
            # The output comes first: clients read the termination message and the log once they learn of
            # the end.
            container.exit_report = report
            self.collect_output(container).addBoth(lambda _: self.record_exit(container, report))
            return
        if state is ContainerState.RUNNING:
            self.record_start(container, report)
        elif state is ContainerState.EXITED:
            self.record_exit(container, report)
        else:
            self._record_creation(container, report)

    def record_start(self, container: Container, report: vmserver.ContainerState) -> Deferred[None]:
        """Make the container RUNNING, unless it has ended. Fires once that is on the disk."""
        self._record_creation(container, report)
        record = container.record
        if record.state in (ContainerState.CREATED, ContainerState.STARTING):
            record = record.to(ContainerState.RUNNING)
        if record.state is ContainerState.RUNNING and not record.started_at:
            record = attrs.evolve(record, started_at=report.started_at or nanoseconds(self._clock))
        written = self._save(container, record)
        if container.state is ContainerState.RUNNING:
            self._logs.ensure(container)
        return written

    def record_exit(self, container: Container, report: vmserver.ContainerState) -> Deferred[None]:
        """Make the container EXITED, without waiting for its log or volumes.

        It is EXITED once its record is on the disk, so that no later daemon shows another state; fires then.
        """
        self._record_creation(container, report)
        if container.recording_exit is None:
            container.exit_report = report
            container.recording_exit = Flight(self._record_exit(container, report))
        return container.recording_exit.join()

    async def _record_exit(self, container: Container, report: vmserver.ContainerState) -> None:
        if container.state in ALIVE:
            started_at = container.record.started_at or report.started_at
            record = container.record.to(
                ContainerState.EXITED,
                started_at=started_at,
                finished_at=max(report.finished_at or nanoseconds(self._clock), started_at),
                exit_code=report.exit_code,
                reason=_reason(container, report),
                message="; ".join(filter(None, [report.message, container.unwritten, container.unlogged])),
            )
            try:
                await self._inventory.store.put_container(record)
            except InfranetesError as error:
                _log.error("the end of container {container} was not recorded: {error}",
                           container=container.id, error=error)  # fmt: skip
            if container.state in ALIVE:
                container.record = record
                pin_later(container.sandbox)
                self._features.ended(container)
        if container.state is ContainerState.EXITED:
            self._logs.ensure(container)

    def _record_creation(self, container: Container, report: vmserver.ContainerState) -> None:
        """Make a CREATING container CREATED: an earlier daemon asked for it and never learnt that it is
        there."""
        if container.state is ContainerState.REMOVING:
            return
        container.reported = report
        container.cache.clear()
        record = container.record
        if record.state is ContainerState.CREATING:
            record = record.to(ContainerState.CREATED, created_at=report.created_at or record.created_at)
            self._inventory.note(self._save(container, record), f"container {container.id}")

    def _save(self, container: Container, record: ContainerRecord) -> Deferred[None]:
        return (
            self._inventory.save_container(container, record) if record != container.record else succeed(None)
        )

    def collect_output(self, container: Container) -> Deferred[None]:
        """Bring an ended container's volumes and log to the node, as far as time allows."""
        if container.collecting is None:
            container.collecting = Flight(self._collect_output(container))
        return container.collecting.join()

    async def _collect_output(self, container: Container) -> None:
        await self._write_back(container)
        self._logs.ensure(container)
        await self._wait_for_output(container, LOG_SECONDS, self._logs.drain(container))
        if container.pump is not None and container.pump.log.lacking:
            container.unlogged = LACKING

    async def _write_back(self, container: Container) -> None:
        container.unwritten = await self._features.collect(container)

    async def _wait_for_output(
        self, container: Container, seconds: float, output: Deferred[None], until: Until = None
    ) -> None:
        try:
            await wait_while_advancing(self._clock, container, output, seconds, until)
        except DeadlineExceeded as error:
            _log.warn("the end of container {container} is reported before its log is complete: {error}",
                      container=container.id, error=error)  # fmt: skip
            container.unlogged = "its log is not complete: it was not read to its end in time"
            if container.pump is not None:
                container.pump.say("the container's end is told before its log was read to its end")

    async def apply_stop(
        self,
        container: Container,
        report: vmserver.ContainerState,
        seconds: float,
        until: Until = None,
    ) -> None:
        """Apply the report of a stopped container.

        :param seconds: how long to wait for a log that does not advance. :param until: see
            `wait_while_advancing`."""
        self.apply(container, report)
        if container.exit_report is None:
            return
        await self._write_back(container)
        await self._wait_for_output(container, seconds, self.collect_output(container), until)
        await self.record_exit(container, report)

    def end_log(self, container: Container, why: str) -> None:
        """Stop writing the container's log, because no more output will come; if some is missing, say so."""
        if self._logs.abort(container, why) and container.state is ContainerState.EXITED:
            message = "; ".join(filter(None, [container.record.message, LACKING]))
            record = attrs.evolve(container.record, message=message)
            self._inventory.note(
                self._inventory.save_container(container, record), f"container {container.id}"
            )

    def record_loss(self, container: Container, reason: str, message: str) -> None:
        """Record the end of a container whose agent can't report it. Does nothing if it has ended."""
        if container.state not in ALIVE:
            return
        if container.exit_report is not None:  # the agent did report the end, a moment ago
            self.record_exit(container, container.exit_report)
            return
        if container.state is ContainerState.RUNNING:
            message = "; ".join(filter(None, [message, self._features.unwritten(container)]))
        now = max(nanoseconds(self._clock), container.record.started_at)
        record = container.record.to(
            ContainerState.EXITED, finished_at=now, exit_code=KILLED, reason=reason, message=message
        )
        self._inventory.note(self._inventory.save_container(container, record), f"container {container.id}")


def hold_report(container: Container, report: vmserver.ContainerState) -> None:
    """Keep the report until the container's start is over; of several the latest counts."""
    if container.held_report is None or _rank(report) >= _rank(container.held_report):
        container.held_report = report


def _reason(container: Container, report: vmserver.ContainerState) -> str:
    if report.reason and report.reason not in ("Completed", "Error"):
        return report.reason
    if container.unwritten:
        return UNWRITTEN_REASON
    return "Completed" if report.exit_code == 0 else "Error"


def _rank(report: vmserver.ContainerState) -> int:
    state = _STATES.get(report.state)
    return -1 if state is None else _ORDER.index(state)
