# SPDX-License-Identifier: Apache-2.0
"""The providers of the node, one or several: each has a context of its machines, and a state."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Protocol

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime, IStreamClientEndpoint

from infranetes.firewalls.agent_ports import AgentPorts
from infranetes.identity.authority import Authority
from infranetes.machines.agentless.access import SSH_PORT
from infranetes.machines.context import NodeNames, NodeServices, ServiceRules
from infranetes.machines.interface import Connect, IAgent
from infranetes.machines.starts import Starts
from infranetes.observer import NULL_OBSERVER, Observer
from infranetes.overlay.overlay import Overlay
from infranetes.pods.node.handler_config import CNI
from infranetes.pods.node.times import Times
from infranetes.pods.store.store import Store
from infranetes.providers.hypervisor import IBootsGuests, IHasHypervisors
from infranetes.providers.interface import IBoundsStarts, IFirewallsPods, IPodProvider
from infranetes_common.concurrency import Event
from infranetes_common.errors import FailedPrecondition, Unavailable
from infranetes_common.nanoseconds import nanoseconds

if TYPE_CHECKING:
    from infranetes.pods.node.inventory import Inventory, Sandbox
    from infranetes.pods.store.records import SandboxRecord


class GuestAgents(Protocol):
    """Makes what takes an agent's place in VMs without one."""

    def agent(self, sandbox_id: str, host: str, provider: IHasHypervisors) -> IAgent:
        """Return a client for a sandbox's VM. :raise NotFound: its provider has no such VM."""


class NoGuests:
    """Takes the place of GuestAgents where all VMs have agents."""

    def agent(self, sandbox_id: str, host: str, provider: IHasHypervisors) -> IAgent:
        raise FailedPrecondition(f"the VM of sandbox {sandbox_id} has no agent, and this node needs one")


@attrs.frozen(eq=False, repr=False)
class SharedParts:
    """The collaborators of the machines and pools of all providers.

    :ivar inventory: has the sandboxes, and the store.
    :ivar release_address: removes what leads to the VM with this id: its address may become another VM's.
    :ivar authority: issues the VMs' certificates. :ivar connect: makes the agents' clients.
    :ivar names: the node's, with which VMs are tagged. :ivar observer: is notified of launches and calls.
    :ivar stopping: happens when the daemon stops: it leaves unfinished work to the next one.
    :ivar contprovider: the ContainerProvider of VMs that wait for a pod; "": the first one of their image.
    :ivar services: the cluster's Services; None: the VMs do not learn them.
    :ivar agent_ports: keeps others from the agents of VMs in networks of others; None: nothing does here.
    :ivar guests: makes what takes the place of agents in VMs without one.
    """

    clock: IReactorTime
    inventory: Inventory
    release_address: Callable[[str], Awaitable[None]]
    authority: Authority
    connect: Connect
    names: NodeNames
    times: Times
    stopping: Event[None]
    observer: Observer = NULL_OBSERVER
    contprovider: str = ""
    services: ServiceRules | None = None
    agent_ports: AgentPorts | None = None
    guests: GuestAgents = attrs.field(factory=NoGuests)


class NodeProvider:
    """One provider, with its own start, troubles and orphans: these do not affect other providers' pods.

    It is the `MachineContext` of its VMs and the `PoolContext` of its pools.

    :ivar ready: happens once the provider has started.
    :ivar trouble: why no VM can be launched or destroyed; "": they can be.
    :ivar starts: the starts of its pods that are under way, and those that wait.
    :ivar orphans: the ids of its instances that had no record in the last pass.
    :ivar next_list: when a pass lists its instances again, by the node's clock.
    :param overlay: gives its pods addresses of the pods' network; None: its VMs need none of these.
    :param node_services: translates the addresses of Services for its VMs without our agent; None: nothing
        does.
    :param gets_subnet: whether it receives the subnet that kubelet gives to pods.
    """

    def __init__(
        self,
        shared: SharedParts,
        provider: IPodProvider,
        overlay: Overlay | None = None,
        node_services: NodeServices | None = None,
        gets_subnet: bool = True,
    ) -> None:
        self._shared = shared
        self.provider = provider
        self.overlay = overlay
        self.node_services = node_services
        self.gets_subnet = gets_subnet
        self.clock = shared.clock
        self.store: Store = shared.inventory.store
        self.authority = shared.authority
        self.names = shared.names
        self.times = shared.times
        self.observer = shared.observer
        self.contprovider = shared.contprovider
        self.services = shared.services
        self.ready: Event[None] = Event()
        self.trouble = "the daemon is starting"
        self.starts = Starts(shared.clock, self._starts_at_once)
        self.orphans: set[str] = set()
        self.next_list = 0.0

    @property
    def name(self) -> str:
        """The provider's name, as in records."""
        return self.provider.name

    def check_ready(self) -> None:
        """Check that the provider can make VMs. :raise Unavailable: it can't; the message says why."""
        if self.trouble:
            raise Unavailable(f"provider {self.name} is not ready: {self.trouble}")

    async def release_address(self, id: str) -> None:
        """Remove what leads to the VM with this id: its address may become another VM's."""
        await self._shared.release_address(id)

    def connect(
        self, sandbox_id: str, host: str, port: int, endpoint: IStreamClientEndpoint | None = None
    ) -> IAgent:
        """Make a client of a VM's agent, to which the node forwards nothing from now on, nor to what takes
        its place in a cloud's VM, its SSH server.

        :param port: 0: there is none of ours in the VM. :param endpoint: as in `Connect`."""
        ports = self._shared.agent_ports
        if not port and IHasHypervisors.providedBy(self.provider):
            if ports is not None and IBootsGuests.providedBy(self.provider):
                ports.keep(sandbox_id, host, SSH_PORT)
            return self._shared.guests.agent(sandbox_id, host, self.provider)
        if ports is not None and endpoint is None and not self._on_own_bridge(sandbox_id):
            ports.keep(sandbox_id, host, port)
        return self._shared.connect(sandbox_id, host, port, endpoint)

    def _starts_at_once(self) -> int:
        return self.provider.starts_at_once() if IBoundsStarts.providedBy(self.provider) else 0

    def _on_own_bridge(self, id: str) -> bool:
        sandbox = self._shared.inventory.sandboxes.get(id)
        in_cni = sandbox is not None and sandbox.record.network == CNI
        return IFirewallsPods.providedBy(self.provider) and not in_cni

    @property
    def stopping(self) -> bool:
        """Whether the daemon is stopping, and leaves unfinished work to the next one."""
        return self._shared.stopping.happened

    def now(self) -> int:
        """Return the time in nanoseconds since 1970 UTC."""
        return nanoseconds(self.clock)

    def note(self, write: Deferred[None], what: str) -> None:
        """Let a write finish in the background and log its failure."""
        self._shared.inventory.note(write, what)


class Providers:
    """The providers of the node: iterates over them, the node's own first.

    :param make: makes a node provider.
    :param own: the node's own provider, for pods whose handler names none.
    :ivar own: that provider. :ivar by_name: all of them."""

    def __init__(
        self, make: Callable[[IPodProvider], NodeProvider], own: IPodProvider, *others: IPodProvider
    ) -> None:
        self._make = make
        self.by_name: dict[str, NodeProvider] = {}
        self.own = self.add(own)
        for provider in others:
            self.add(provider)

    def __iter__(self) -> Iterator[NodeProvider]:
        return iter(self.by_name.values())

    def add(self, provider: IPodProvider) -> NodeProvider:
        """Add another provider to this node."""
        node_provider = self.by_name[provider.name] = self._make(provider)
        return node_provider

    def of(self, record: SandboxRecord) -> NodeProvider:
        """Return the provider of a sandbox's VM. Every record has one, once the records are loaded."""
        return self.by_name[record.provider]

    def started(self, sandbox: Sandbox) -> Event[None]:
        """Return the event that happens once the provider of the sandbox's VM has started."""
        return self.of(sandbox.record).ready

    @property
    def trouble(self) -> str:
        """The reason why no provider can make VMs; "" if at least one can."""
        troubles = [(node_provider.name, node_provider.trouble) for node_provider in self]
        if not all(trouble for _, trouble in troubles):
            return ""
        if len(troubles) == 1:
            return troubles[0][1]
        return "; ".join(f"provider {name}: {trouble}" for name, trouble in troubles)
