"""What an agent says of its containers, taken into their records."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.logger import Logger
from zope.interface import implementer

from infranetes.agent.view import AgentView, IViewListener, Reach
from infranetes.pods.inventory import Container, Sandbox
from infranetes.pods.node import Node
from infranetes.pods.states import ContainerState
from infranetes.pods.waits import Flight, go, within
from infranetes_common import cri
from infranetes_common.errors import DeadlineExceeded, InfranetesError

KILLED = 137  # the exit code of what a SIGKILL ended: also of a process whose machine is gone
LOST_REASON = "VMEnded"
GONE_REASON = "ContainerLost"
LOG_SECONDS = 10.0  # that a container's end waits for its log

_STATES = {
    cri.CONTAINER_CREATED: ContainerState.CREATED,
    cri.CONTAINER_RUNNING: ContainerState.RUNNING,
    cri.CONTAINER_EXITED: ContainerState.EXITED,
}
_ORDER = [
    ContainerState.CREATING,
    ContainerState.CREATED,
    ContainerState.RUNNING,
    ContainerState.EXITED,
    ContainerState.REMOVING,
]

_RUN = (ContainerState.CREATED, ContainerState.RUNNING)

_log = Logger()


def take(node: Node, container: Container, seen: Any, *, at_once: bool = False) -> None:
    """Take in a vmserver.ContainerState. What is older than what is known already changes nothing.

    A container whose creation is under way is left to it. An end is taken in once what the container
    leaves behind is on the node, or now, `at_once`.
    """
    state = _STATES.get(seen.state)
    if state is None or container.state is ContainerState.REMOVING:
        return
    if container.making:
        return
    if _ORDER.index(state) < _ORDER.index(container.state):
        return
    if state is ContainerState.EXITED and container.state in _RUN and not at_once:
        # Who is told of the end reads the termination message and the log then.
        container.outcome = seen
        _left(node, container).addBoth(lambda _: take(node, container, seen, at_once=True))
        return
    container.seen = seen
    container.cache.clear()
    record = container.record
    if record.state is ContainerState.CREATING:  # an earlier daemon asked for it; nobody was told of it
        record = record.to(ContainerState.CREATED, created_at=seen.created_at or record.created_at)
    if state is not record.state:
        record = record.to(state)
    if state is ContainerState.RUNNING and not record.started_at:
        record = attrs.evolve(record, started_at=seen.started_at or node.now())
    if state is ContainerState.EXITED and not record.finished_at:
        record = attrs.evolve(
            record,
            started_at=seen.started_at or record.started_at,
            finished_at=seen.finished_at or node.now(),
            exit_code=seen.exit_code,
            reason=seen.reason or ("Completed" if seen.exit_code == 0 else "Error"),
            message=seen.message,
        )
    if record != container.record:
        node.note(node.save_container(container, record), f"container {container.id}")
    if container.state in (ContainerState.RUNNING, ContainerState.EXITED):
        node.logs.ensure(container)


def _left(node: Node, container: Container) -> Deferred[None]:
    """Fires when what an ended container wrote to volumes and to its log is on the node, as far as it can
    be had in time."""
    if container.leaving is None:
        container.leaving = Flight(go(_leave(node, container)))
    return container.leaving.join()


async def _leave(node: Node, container: Container) -> None:
    await node.volumes.flush(container)
    node.logs.ensure(container)
    try:
        await within(node.clock, LOG_SECONDS, node.logs.drain(container), "the rest of the log")
    except DeadlineExceeded as error:
        _log.warn(
            "the end of container {container} is told before its log is complete: {error}",
            container=container.id,
            error=error,
        )


def end(node: Node, container: Container, reason: str, message: str) -> None:
    """Record that a container has ended whose agent can't tell how. Ended before: nothing changes."""
    if container.state not in (ContainerState.CREATED, ContainerState.RUNNING):
        return
    if container.outcome is not None:  # its agent did tell, a moment ago
        take(node, container, container.outcome, at_once=True)
        return
    record = container.record.to(
        ContainerState.EXITED, finished_at=node.now(), exit_code=KILLED, reason=reason, message=message
    )
    node.note(node.save_container(container, record), f"container {container.id}")


def vm_ended(node: Node, sandbox: Sandbox, message: str) -> None:
    """Record that a sandbox's VM is no more, and with it all that ran in it."""
    for container in list(sandbox.containers.values()):
        end(node, container, LOST_REASON, message)
        node.logs.abort(container)
    node.volumes.forget(sandbox)
    disconnect(sandbox)


def disconnect(sandbox: Sandbox) -> None:
    """Let go of the sandbox's agent."""
    view, sandbox.view = sandbox.view, None
    client, sandbox.client = sandbox.client, None
    if view is not None:
        view.stop()
    if client is not None:
        go(client.close()).addErrback(lambda _: None)


def connect(node: Node, sandbox: Sandbox) -> None:
    """Make the client of the sandbox's agent, and the view, not yet started. Connected: nothing."""
    if sandbox.client is None:
        record = sandbox.record
        sandbox.client = node.connect(sandbox.id, record.agent_host, record.agent_port)
    if sandbox.view is None:  # a VM of the pool has a client already
        sandbox.view = AgentView(
            node.clock, sandbox.client, Follower(node, sandbox), node.gate, node.times.view
        )


@implementer(IViewListener)
class Follower:
    """Keeps the records of one sandbox's containers what its agent says they are."""

    def __init__(self, node: Node, sandbox: Sandbox) -> None:
        self._node = node
        self._sandbox = sandbox
        self._expected: list[Container] = []

    def asking(self) -> None:
        """What is being made right now may come too late for the snapshot."""
        self._expected = [
            container for container in self._sandbox.containers.values() if not container.making
        ]

    def snapshot(self, states: dict[str, Any]) -> None:
        """Containers that the agent should know and does not are gone."""
        for state in states.values():
            self.changed(state)
        for container in self._expected:
            if container.id not in states:
                self._gone(container)
        self._expected = []

    def changed(self, state: Any) -> None:
        """A container without a record was given up while it was being made: it is ended."""
        container = self._sandbox.containers.get(state.id)
        if container is not None:
            take(self._node, container, state)
        else:
            go(self._purge(state.id)).addErrback(
                lambda failure: _log.info(
                    "container {container} of no record is still in the VM of sandbox {sandbox}: {error}",
                    container=state.id,
                    sandbox=self._sandbox.id,
                    error=failure.value,
                )
            )

    def removed(self, container_id: str) -> None:
        """Nothing in here removes a container without its record going too, so this one was lost."""
        container = self._sandbox.containers.get(container_id)
        if container is not None:
            self._gone(container)

    def reach_changed(self, reach: Reach) -> None:
        """For people; lists ask the view."""
        view = self._sandbox.view
        if reach is Reach.UNREACHABLE and view is not None:
            _log.warn(
                "the agent of sandbox {sandbox} can't be reached: {error}",
                sandbox=self._sandbox.id,
                error=view.trouble,
            )
        for container in self._sandbox.containers.values():
            container.cache.clear()

    def _gone(self, container: Container) -> None:
        if container.id not in self._sandbox.containers:
            return
        if container.state is ContainerState.CREATING:
            if not container.making:
                self._node.inventory.discard_container(container)
                self._node.note(
                    self._node.store.delete_container(container.id), f"the end of container {container.id}"
                )
            return
        end(self._node, container, GONE_REASON, "its VM no longer knows this container")
        self._node.logs.abort(container)

    async def _purge(self, container_id: str) -> None:
        if self._sandbox.client is None:
            return
        try:
            await self._sandbox.client.remove(container_id)
        except InfranetesError as error:
            _log.info("container {container} remains: {error}", container=container_id, error=error)
