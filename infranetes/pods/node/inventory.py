# SPDX-License-Identifier: Apache-2.0
"""The sandboxes and containers in memory, found by id, by a unique prefix of the id, or by name."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

import attrs
from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger

from infranetes.pods.node.events import Events
from infranetes.pods.node.loads import Loads
from infranetes.pods.store.records import ContainerRecord, LogPosition, SandboxRecord
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.pods.store.store import Store
from infranetes_common.concurrency import Event, Flight
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound
from infranetes_common.wire import cri, vmserver

if TYPE_CHECKING:
    from infranetes.machines.agent.container_watch import ContainerWatch
    from infranetes.machines.interface import IAgent
    from infranetes.machines.pod_machine import PodMachine
    from infranetes.machines.timeline import Timeline
    from infranetes.pods.node.logs import Pump
    from infranetes.providers.interface import Instance


PAST_SANDBOXES = 32  # how many removed sandboxes' timelines are kept, such as those of failed launches

_log = Logger()


def sandbox_name(metadata: cri.PodSandboxMetadata) -> str:
    """Return the name that makes a sandbox unique: its pod and kubelet's attempt."""
    parts = (metadata.namespace, metadata.name, metadata.uid, str(metadata.attempt))
    return "/".join(quote(part, safe="") for part in parts)


def container_name(metadata: cri.ContainerMetadata) -> str:
    """Return the name that makes a container unique in its sandbox."""
    return f"{quote(metadata.name, safe='')}/{metadata.attempt}"


class Container:
    """One container. `record` is what the store has or is about to have; assigning it empties `cache`.

    :ivar events: notified of each change of the container's state.
    :ivar reported: the last state that the agent reported; None before the first report.
    :ivar cache: messages of the CRI made from the record, by the callers' own keys.
    :ivar adopts: whether it takes the place, with its volumes, of one that its VM had when that was kept.
    :ivar being_created: whether its creation is under way in this process, and will settle its record.
    :ivar starting: happens when the start that is under way in this process is over; None: there is none.
    :ivar start_unconfirmed: whether the answer to an earlier start was lost, so that it may be running.
    :ivar held_report: the agent's latest report during the start; applied when the start is over.
    :ivar requested_at: when its start or its removal was asked for, by the reactor's clock.
    :ivar stops: how many calls are stopping it now.
    :ivar pump: writes its log; None if it has no log, or was not started.
    :ivar exit_report: the agent's report of its end, from its arrival until the end is recorded.
    :ivar collecting: brings the output of the ended container to the node.
    :ivar unwritten: what it wrote to volumes that did not reach the node, as a message; "": nothing.
    :ivar unlogged: that its log lacks lines, as a message; "": it lacks none.
    :ivar recording_exit: records its end.
    """

    def __init__(self, sandbox: Sandbox, record: ContainerRecord, log: LogPosition | None = None) -> None:
        self.sandbox = sandbox
        self.config: cri.ContainerConfig = cri.ContainerConfig.FromString(record.config)
        self.name = container_name(self.config.metadata)
        self.cache: dict[str, bytes] = {}
        self._record = record
        self.events = Events()  # the inventory's, once it is in one
        self.reported: vmserver.ContainerState | None = None
        self.log_position = log
        self.pump: Pump | None = None
        self.adopts = False
        self.being_created = False
        self.starting: Event[None] | None = None
        self.start_unconfirmed = record.state is ContainerState.STARTING
        self.held_report: vmserver.ContainerState | None = None
        self.stops = 0
        self.requested_at: float | None = None
        self.creating: Flight[None] | None = None
        self.removing: Flight[None] | None = None
        self.collecting: Flight[None] | None = None
        self.unwritten = ""
        self.unlogged = ""
        self.exit_report: vmserver.ContainerState | None = None
        self.recording_exit: Flight[None] | None = None

    def reconfigure(self, config: cri.ContainerConfig) -> None:
        """Change what the container was created with, as an update asks for. The record is to be saved."""
        self.config = config
        self.record = attrs.evolve(self.record, config=config.SerializeToString(deterministic=True))

    @property
    def id(self) -> str:
        return self._record.id

    @property
    def record(self) -> ContainerRecord:
        return self._record

    @record.setter
    def record(self, record: ContainerRecord) -> None:
        before, self._record = self._record, record
        self.cache.clear()
        if record.state is not before.state:
            self.events.container_changed(self, before.state, record.state)

    @property
    def state(self) -> ContainerState:
        return self._record.state

    @property
    def limits(self) -> cri.LinuxContainerResources:
        """Its limits, as its agent has reported them or as it was created with."""
        seen = self.reported
        return (
            seen.resources if seen is not None and seen.HasField("resources") else self.config.linux.resources
        )

    @property
    def shown(self) -> bool:
        """Whether the CRI shows the container."""
        return self._record.state is not ContainerState.CREATING


class Sandbox:
    """One sandbox. `record` is what the store has or is about to have; assigning it empties `cache`.

    :param machine_for: makes the PodMachine of the sandbox's VM.
    :ivar machine: its VM, or the one that it is going to have.
    :ivar events: notified of each change of the sandbox's state.
    :ivar loads: the images and layers on their way into the VM.
    :ivar ending: destroys the VM after a failed launch or boot, or with its container.
    :ivar zone: the zone that its VM has to be in; "": any. None: this process has not looked it up.
    :ivar resizing: held while its VM is resized or pinned.
    :ivar pinned: the node's processors and memory nodes that its VM was pinned to; None: not by this process.
    :ivar asked_until: the time of the clock until which the last call that asked for its VM or a container
        waits; 0: it does not say.
    :ivar awaited_until: the time of the clock until which calls wait for its stop.
    :ivar asleep: the figures that it had when it fell asleep; None: it is awake.
    :ivar failure: why its last launch, boot or stop failed; "": it did not, or a later one succeeded.
    :ivar interrupted: the reason why the cloud will take its VM away; "": none is known. An interrupted
        sandbox is shown as not ready and gets no more containers. Its agent reports this to each daemon.
    """

    def __init__(self, record: SandboxRecord, machine_for: Callable[[Sandbox], PodMachine]) -> None:
        self.config: cri.PodSandboxConfig = cri.PodSandboxConfig.FromString(record.config)
        self.containers: dict[str, Container] = {}
        self.cache: dict[str, bytes] = {}
        self._record = record
        self.watch: ContainerWatch | None = None
        self.loads = Loads()
        self.launching: Flight[None] | None = None
        self.stopping: Flight[None] | None = None
        self.removing: Flight[None] | None = None
        self.ending: Flight[None] | None = None
        self.deserted: IDelayedCall | None = None  # the timer that ends a launch that no call waits for
        self.aborted = ""  # why the launch was ended, for messages
        self.failure = ""
        self.zone: str | None = None
        self.events = Events()  # the inventory's, once it is in one
        self.interrupted = ""
        self.asleep: vmserver.StatsResponse | None = None
        self.asked_until = 0.0
        self.awaited_until = 0.0
        self.pinned: tuple[str, str] | None = None
        self.resizing = DeferredLock()
        self.machine = machine_for(self)

    @property
    def id(self) -> str:
        return self._record.id

    def awaited(self) -> float:
        """Return the time of the clock until which somebody waits for the sandbox's stop."""
        return self.awaited_until

    @property
    def client(self) -> IAgent | None:
        """The client of its VM's agent, or None."""
        return self.machine.client

    @property
    def instance(self) -> Instance | None:
        """Its VM as the provider last described it to this process; None before that."""
        return self.machine.instance

    @property
    def timeline(self) -> Timeline:
        """The steps of its life in this process, including those of a pool's VM before it was claimed."""
        return self.machine.timeline

    def change_machine(self, machine: PodMachine) -> None:
        """Replace the sandbox's VM, keeping its timeline."""
        machine.timeline.take(self.timeline)
        self.machine = machine

    @property
    def pod(self) -> str:
        """Its pod as `namespace/name`, for messages."""
        return f"{self.config.metadata.namespace}/{self.config.metadata.name}"

    @property
    def record(self) -> SandboxRecord:
        return self._record

    @record.setter
    def record(self, record: SandboxRecord) -> None:
        before, self._record = self._record, record
        self.cache.clear()
        if record.state is not before.state:
            self.events.sandbox_changed(self, before.state, record.state)

    @property
    def state(self) -> SandboxState:
        return self._record.state

    @property
    def trouble(self) -> str:
        """What is wrong with it, as a message; "": nothing, as far as is known."""
        of_agent = self.watch.trouble if self.watch is not None else ""
        return self.record.message or self.interrupted or self.failure or of_agent

    def agent(self) -> IAgent:
        """Return the client of its VM's agent. :raise FailedPrecondition: the sandbox is not ready."""
        if self.state is not SandboxState.READY or self.client is None:
            raise FailedPrecondition(f"sandbox {self.id} is not ready: it is {self.state.value}")
        return self.client

    def interrupt(self, reason: str) -> None:
        """Record that the cloud will take the sandbox's VM away."""
        self.interrupted = reason
        self.cache.clear()
        self.events.sandbox_interrupted(self)

    def leave(self) -> None:
        """End what is under way for the sandbox, and its agent's stream: the next daemon goes on with it."""
        flights = [self.launching, self.stopping, self.removing, self.ending]
        for container in self.containers.values():
            flights += [container.creating, container.removing]
        self.loads.cancel()
        for flight in flights:
            if flight is not None and not flight.done:
                flight.cancel()
        if self.deserted is not None and self.deserted.active():
            self.deserted.cancel()
        if self.watch is not None:
            self.watch.stop()
        self.machine.stop_telling()

    def check_stays(self) -> None:
        """Check that the sandbox may get more containers.

        :raise FailedPrecondition: its VM will be taken away."""
        if self.interrupted:
            raise FailedPrecondition(
                f"sandbox {self.id} gets no more containers: {self.interrupted}; its pod needs a new sandbox"
            )


@attrs.frozen
class PastSandbox:
    """The memory of a sandbox that was removed, or whose launch failed.

    :ivar trouble: what was wrong with it, as a message; "": nothing, as far as is known.
    """

    record: SandboxRecord
    metadata: cri.PodSandboxMetadata
    timeline: Timeline
    trouble: str = ""

    @property
    def failed(self) -> bool:
        """Whether its launch failed. Every other sandbox is stopped before it is removed."""
        return self.record.state is not SandboxState.STOPPED

    @property
    def pod(self) -> str:
        """Its pod's namespace and name, for people."""
        return f"{self.metadata.namespace}/{self.metadata.name}"


_Entry = TypeVar("_Entry", Sandbox, Container)


class Inventory:
    """All sandboxes and containers. A name is reserved from when its owner is added until that is removed.

    :ivar store: their records on the disk.
    :ivar events: emits the events of all of them.
    :ivar past: the sandboxes that were discarded last, so that one can ask what became of them.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.events = Events()
        self.past: deque[PastSandbox] = deque(maxlen=PAST_SANDBOXES)
        self.sandboxes: dict[str, Sandbox] = {}
        self.containers: dict[str, Container] = {}
        self._names: dict[str, Sandbox] = {}
        self._tokens: dict[str, Sandbox] = {}

    def add(self, sandbox: Sandbox) -> None:
        """Add a sandbox that has no containers yet."""
        sandbox.events = self.events
        self.sandboxes[sandbox.id] = sandbox
        self._tokens[sandbox.record.token] = sandbox
        if sandbox.state is not SandboxState.ABANDONED:
            self._names[sandbox.record.name] = sandbox

    def become(self, sandbox: Sandbox, record: SandboxRecord) -> None:
        """Give a new id and token, those of `record`, to a sandbox that has no containers yet."""
        del self.sandboxes[sandbox.id]
        del self._tokens[sandbox.record.token]
        sandbox.record = record
        self.add(sandbox)

    def release_name(self, sandbox: Sandbox) -> None:
        """Let another sandbox take this sandbox's name from now on."""
        if self._names.get(sandbox.record.name) is sandbox:
            del self._names[sandbox.record.name]

    def save(self, sandbox: Sandbox, record: SandboxRecord) -> Deferred[None]:
        """Make `record` the sandbox's, in memory at once. Fires when it is on the disk."""
        if record.state is SandboxState.ABANDONED:
            self.release_name(sandbox)
        sandbox.record = record
        return self.store.put_sandbox(record)

    async def commit(self, sandbox: Sandbox, record: SandboxRecord) -> None:
        """Make `record` the sandbox's once it is on the disk."""
        await self.store.put_sandbox(record)
        sandbox.record = record

    def save_container(self, container: Container, record: ContainerRecord) -> Deferred[None]:
        """Make `record` the container's, in memory at once. Fires when it is on the disk."""
        container.record = record
        return self.store.put_container(record)

    def note(self, write: Deferred[None], what: str) -> None:
        """Let a write finish in the background and log its failure: what it records can be learnt again."""
        write.addErrback(lambda failure: _log.error("{what} was not recorded: {error}",
                                                    what=what, error=failure.value))  # fmt: skip

    def discard(self, sandbox: Sandbox) -> None:
        """Forget a sandbox and its containers."""
        for container in list(sandbox.containers.values()):
            self.discard_container(container)
        self.release_name(sandbox)
        removed = self.sandboxes.pop(sandbox.id, None)
        self._tokens.pop(sandbox.record.token, None)
        if removed is not None:
            past = PastSandbox(sandbox.record, sandbox.config.metadata, sandbox.timeline, sandbox.trouble)
            self.past.append(past)
            self.events.sandbox_removed(sandbox)

    def add_container(self, container: Container) -> None:
        """Add a container of a sandbox that the inventory has."""
        container.events = self.events
        self.containers[container.id] = container
        container.sandbox.containers[container.id] = container

    def discard_container(self, container: Container) -> None:
        """Forget a container."""
        removed = self.containers.pop(container.id, None)
        container.sandbox.containers.pop(container.id, None)
        if removed is not None:
            self.events.container_removed(container)

    def failed(self) -> dict[str, PastSandbox]:
        """Return by namespace and name the pods whose newest sandbox that is gone has failed to launch."""
        newest = {past.pod: past for past in self.past}
        return {pod: past for pod, past in newest.items() if past.failed}

    def named(self, name: str) -> Sandbox | None:
        """Return the sandbox with this name, or None."""
        return self._names.get(name)

    def by_token(self, token: str) -> Sandbox | None:
        """Return the sandbox whose VM was launched with this token, or None."""
        return self._tokens.get(token)

    def sandbox(self, id: str) -> Sandbox:
        """Return the sandbox with this id, or the only one whose id begins with it.

        :raise NotFound: there is none. :raise InvalidArgument: there are several, or `id` is empty."""
        return _find(self.sandboxes, id, "sandbox")

    def container(self, id: str) -> Container:
        """Return the container with this id, or the only one whose id begins with it.

        Raises as `sandbox` does."""
        return _find(self.containers, id, "container")

    def container_named(self, sandbox: Sandbox, name: str) -> Container | None:
        """Return the container of `sandbox` with this name, or None."""
        return next((container for container in sandbox.containers.values() if container.name == name), None)

    def __iter__(self) -> Iterator[Sandbox]:
        return iter(list(self.sandboxes.values()))


def _find(entries: dict[str, _Entry], id: str, kind: str) -> _Entry:
    entry = entries.get(id)
    if entry is not None:
        return entry
    if not id:
        raise InvalidArgument(f"{kind}_id is empty: give an id, or the first characters of one")
    matches = [entry for full_id, entry in entries.items() if full_id.startswith(id)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise InvalidArgument(f"{kind} {id}: {len(matches)} ids begin with this; give more characters")
    raise NotFound(f"no {kind} has the id {id[:64]}")
