"""Every sandbox and container as it lives in memory, found by id, by a unique prefix, or by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from twisted.internet.defer import Deferred

from infranetes.pods.events import Events
from infranetes.pods.records import ContainerRecord, LogPosition, SandboxRecord
from infranetes.pods.states import ContainerState, SandboxState
from infranetes.pods.waits import Flight
from infranetes_common import cri
from infranetes_common.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from infranetes.agent.client import AgentClient
    from infranetes.agent.view import AgentView


def sandbox_name(metadata: cri.PodSandboxMetadata) -> str:
    """What makes a sandbox unique, as kubelet means it: each of its attempts at a pod has its own."""
    parts = (metadata.namespace, metadata.name, metadata.uid, str(metadata.attempt))
    return "/".join(quote(part, safe="") for part in parts)


def container_name(metadata: cri.ContainerMetadata) -> str:
    """What makes a container unique in its sandbox."""
    return f"{quote(metadata.name, safe='')}/{metadata.attempt}"


class Container:
    """One container. `record` is what the store has or is about to have; assigning it drops `cache`.

    :ivar told: told of each change of its state.
    :ivar seen: the agent's last vmserver.ContainerState of it, None before the first.
    :ivar cache: what the CRI's side has made of the record, by its own keys.
    :ivar making: its creation is under way in this process, and settles its record.
    :ivar pump: what writes its log, None where it has none or before it is started.
    :ivar leaving: it has ended, and what it leaves behind is being brought to the node.
    :ivar outcome: the vmserver.ContainerState that tells so, until it is taken in.
    """

    def __init__(self, sandbox: Sandbox, record: ContainerRecord, log: LogPosition | None = None) -> None:
        self.sandbox = sandbox
        self.config: cri.ContainerConfig = cri.ContainerConfig.FromString(record.config)
        self.name = container_name(self.config.metadata)
        self.cache: dict[str, Any] = {}
        self._record = record
        self.seen: Any = None
        self.log_position = log
        self.pump: Any = None
        self.told: Callable[[Container, ContainerState, ContainerState], None] = _nobody
        self.making = False
        self.creating: Flight[None] | None = None
        self.removing: Flight[None] | None = None
        self.leaving: Flight[None] | None = None
        self.outcome: Any = None

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
            self.told(self, before.state, record.state)

    @property
    def state(self) -> ContainerState:
        return self._record.state

    @property
    def shown(self) -> bool:
        """Whether the CRI shows it."""
        return self._record.state is not ContainerState.CREATING


class HasVm:
    """What a sandbox and a VM of the pool have in common.

    :ivar instance: the provider's last word on the VM, None before the first in this process.
    :ivar asked: the provider's launch of it in this process.
    """

    def __init__(self) -> None:
        self.client: AgentClient | None = None
        self.instance: Any = None
        self.asked: Flight[Any] | None = None

    def ask_for_vm(self, launch: Deferred[Any]) -> Deferred[Any]:
        """The provider's answer. Cancelled: the provider goes on, and `asked` has its answer."""
        self.asked = Flight(launch)
        return self.asked.join()


class Sandbox(HasVm):
    """One sandbox. `record` is what the store has or is about to have; assigning it drops `cache`.

    :ivar told: told of each change of its state.
    :ivar loads: images on their way into the VM, by image id.
    :ivar ending: the end of an ABANDONED one.
    """

    def __init__(self, record: SandboxRecord) -> None:
        super().__init__()
        self.config: cri.PodSandboxConfig = cri.PodSandboxConfig.FromString(record.config)
        self.containers: dict[str, Container] = {}
        self.cache: dict[str, Any] = {}
        self._record = record
        self.view: AgentView | None = None
        self.loads: dict[str, Flight[None]] = {}
        self.launching: Flight[None] | None = None
        self.stopping: Flight[None] | None = None
        self.removing: Flight[None] | None = None
        self.ending: Flight[None] | None = None
        self.deserted: Any = None  # the delayed call that ends a launch which nobody waits for
        self.aborted = ""  # why its launch is ended, for people
        self.told: Callable[[Sandbox, SandboxState, SandboxState], None] = _nobody

    @property
    def id(self) -> str:
        return self._record.id

    @property
    def record(self) -> SandboxRecord:
        return self._record

    @record.setter
    def record(self, record: SandboxRecord) -> None:
        before, self._record = self._record, record
        self.cache.clear()
        if record.state is not before.state:
            self.told(self, before.state, record.state)

    @property
    def state(self) -> SandboxState:
        return self._record.state


def _nobody(*change: object) -> None:
    """Before the inventory has it, nobody is told."""


_Thing = TypeVar("_Thing", Sandbox, Container)


class Inventory:
    """All of them. Names are reserved from the moment a thing is added until it is removed.

    :ivar events: tells what becomes of them.
    """

    def __init__(self) -> None:
        self.events = Events()
        self.sandboxes: dict[str, Sandbox] = {}
        self.containers: dict[str, Container] = {}
        self._names: dict[str, Sandbox] = {}
        self._tokens: dict[str, Sandbox] = {}

    def add(self, sandbox: Sandbox) -> None:
        """Take in a sandbox that has no containers yet."""
        sandbox.told = self.events.sandbox_changed
        self.sandboxes[sandbox.id] = sandbox
        self._tokens[sandbox.record.token] = sandbox
        if sandbox.state is not SandboxState.ABANDONED:
            self._names[sandbox.record.name] = sandbox

    def become(self, sandbox: Sandbox, record: SandboxRecord) -> None:
        """Give a sandbox that has no containers yet another id and token."""
        del self.sandboxes[sandbox.id]
        del self._tokens[sandbox.record.token]
        sandbox.record = record
        self.add(sandbox)

    def release_name(self, sandbox: Sandbox) -> None:
        """Another sandbox may have the name from now on."""
        if self._names.get(sandbox.record.name) is sandbox:
            del self._names[sandbox.record.name]

    def discard(self, sandbox: Sandbox) -> None:
        """Forget a sandbox and its containers."""
        for container in list(sandbox.containers.values()):
            self.discard_container(container)
        self.release_name(sandbox)
        known = self.sandboxes.pop(sandbox.id, None)
        self._tokens.pop(sandbox.record.token, None)
        if known is not None:
            self.events.sandbox_gone(sandbox)

    def add_container(self, container: Container) -> None:
        """Take in a container of a sandbox that is here."""
        container.told = self.events.container_changed
        self.containers[container.id] = container
        container.sandbox.containers[container.id] = container

    def discard_container(self, container: Container) -> None:
        """Forget a container."""
        known = self.containers.pop(container.id, None)
        container.sandbox.containers.pop(container.id, None)
        if known is not None:
            self.events.container_gone(container)

    def named(self, name: str) -> Sandbox | None:
        """The sandbox that has this name."""
        return self._names.get(name)

    def by_token(self, token: str) -> Sandbox | None:
        """The sandbox whose VM has this token."""
        return self._tokens.get(token)

    def sandbox(self, id: str) -> Sandbox:
        """The sandbox with this id, or the only one whose id begins so.

        :raise NotFound: there is none. :raise InvalidArgument: there are several, or it is empty."""
        return _find(self.sandboxes, id, "sandbox")

    def container(self, id: str) -> Container:
        """The container with this id, or the only one whose id begins so; as `sandbox`."""
        return _find(self.containers, id, "container")

    def container_named(self, sandbox: Sandbox, name: str) -> Container | None:
        """The container of `sandbox` that has this name."""
        return next((one for one in sandbox.containers.values() if one.name == name), None)

    def __iter__(self) -> Iterator[Sandbox]:
        return iter(list(self.sandboxes.values()))


def _find(things: dict[str, _Thing], id: str, what: str) -> _Thing:
    thing = things.get(id)
    if thing is not None:
        return thing
    if not id:
        raise InvalidArgument(f"{what}_id is empty: give an id, or the first characters of one")
    found = [one for known, one in things.items() if known.startswith(id)]
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidArgument(f"{what} {id}: {len(found)} ids begin so; give more characters")
    raise NotFound(f"no {what} has the id {id[:64]}")
