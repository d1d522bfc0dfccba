# SPDX-License-Identifier: Apache-2.0
"""In-memory fakes of `pods`' collaborators, and a node made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import attrs
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IDelayedCall, IStreamClientEndpoint
from twisted.internet.task import Clock

from infranetes.control.describe import DescribeCalls
from infranetes.control.service import ControlService
from infranetes.cri.containers import ContainerCalls
from infranetes.cri.sandboxes import SandboxCalls
from infranetes.cri.status import StatusCalls
from infranetes.daemon.node import Node
from infranetes.firewalls.agent_ports import AgentPorts
from infranetes.hostports.hostports import HostPorts
from infranetes.hostports.mappings import HostPort
from infranetes.hostports.table import HostPortTable, elements
from infranetes.identity.authority import Authority
from infranetes.identity.certificates import Signed
from infranetes.kubernetes.pod_needs import PodNeeds
from infranetes.machines.agent.container_watch import WatchTimes
from infranetes.machines.context import NodeNames, ServiceRules
from infranetes.machines.interface import IAgent
from infranetes.machines.pod_machine import PodMachine
from infranetes.machines.pool import Pool
from infranetes.machines.pool_config import PoolConfig
from infranetes.monitoring.gauges import ShownNode
from infranetes.observer import NULL_OBSERVER, Observer
from infranetes.pods.features.guests import Guests
from infranetes.pods.features.host_ports import PodHostPorts
from infranetes.pods.features.overlay import NetworkChoice
from infranetes.pods.features.services import PodServices
from infranetes.pods.features.shadows import NoShadows
from infranetes.pods.features.starts import PodStarts
from infranetes.pods.node.handler_config import DOCKER, MACHINE
from infranetes.pods.node.handlers import Handler, Handlers
from infranetes.pods.node.hooks import Features, PodFeature
from infranetes.pods.node.inventory import Inventory, Sandbox
from infranetes.pods.node.logs import Logs
from infranetes.pods.node.node_providers import NodeProvider, NoGuests, Providers, SharedParts
from infranetes.pods.node.pools import Pools
from infranetes.pods.node.times import Times
from infranetes.pods.sandboxes.machine_images import BootSources
from infranetes.pods.store.records import SandboxRecord
from infranetes.pods.vm.listing import Listing
from infranetes.providers.interface import Instance, IPodProvider
from infranetes_common.concurrency import Coro, Event, start
from infranetes_common.nanoseconds import nanoseconds
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from tests.infranetes.pods.fake_agent import FakeAgent
from tests.infranetes.pods.fake_images import FakeImages
from tests.infranetes.pods.fake_provider import FakeProvider
from tests.infranetes.pods.fake_store import DeadStore, InlineStore
from tests.infranetes.pods.scheduling import Kind

T = TypeVar("T")


class FakeLogs:
    """Count calls. `slow`: draining does not end. `lacking`: what is aborted was not complete."""

    def __init__(self) -> None:
        self.ensured: list[str] = []
        self.aborted: list[str] = []
        self.reopened: list[str] = []
        self.slow: Deferred[None] | None = None
        self.lacking = False
        self.opening: Deferred[None] = succeed(None)
        self.prepared: list[str] = []
        self.refusal: Exception | None = None

    async def prepare(self, container: Any) -> None:
        self.prepared.append(container.id)
        if self.refusal is not None:
            raise self.refusal

    async def wait_until_open(self, container: Any) -> None:
        await self.opening

    def ensure(self, container: Any) -> None:
        self.ensured.append(container.id)

    def drain(self, container: Any) -> Deferred[None]:
        return succeed(None) if self.slow is None else self.slow

    def abort(self, container: Any, why: str) -> bool:
        self.aborted.append(container.id)
        return self.lacking

    async def reopen(self, container: Any) -> None:
        self.reopened.append(container.id)


class Carried(PodFeature):
    """Stands in for `Volumes`, and carries nothing into VMs. Tests replace its hooks."""

    name = "what is carried"


class FakeTable:
    """The kernel's table of host ports. :ivar ports: the address that each one leads to."""

    guards = False

    def __init__(self) -> None:
        self.ports: dict[HostPort, str] = {}

    async def replace(self, ports: Mapping[HostPort, str]) -> None:
        self.ports = dict(ports)

    async def current(self) -> set[str]:
        return {one for each in elements(self.ports) for one in each}

    async def forget_flows(self, ports: Sequence[HostPort]) -> None:
        pass

    def loopback_open(self) -> bool:
        return True


class DaemonClock:
    """The clock as one daemon has it. :ivar dead: the daemon was killed, and its timers are gone."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.dead = False

    def seconds(self) -> float:
        return self._clock.seconds()

    def callLater(self, delay: float, call: Callable[..., object], *args: object) -> IDelayedCall:
        return self._clock.callLater(delay, self._call, call, *args)

    def _call(self, call: Callable[..., object], *args: object) -> None:
        if not self.dead:
            call(*args)


class FakeAuthority:
    """A CA that signs nothing; its certificates are numbers."""

    ca_pem = "CA"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._count = 0

    def issue(self, sandbox_id: str, lifetime_seconds: float) -> Signed:
        self._count += 1
        until = self._clock.seconds() + lifetime_seconds
        return Signed(f"certificate {self._count} of {sandbox_id}", "key", f"key {self._count}", until)

    def sign(self, sandbox_id: str, request: bytes, lifetime_seconds: float) -> Signed:
        assert request == sandbox_id.encode()
        return attrs.evolve(self.issue(sandbox_id, lifetime_seconds), key_pem="")


class FakeNode:
    """A daemon over fakes; `restart` makes the next daemon over the same ones.

    :param scheduler: decides when the fakes do and answer what they are asked for; None: at once.
    :ivar observer: of the next daemon, as the others of these."""

    observer: Observer = NULL_OBSERVER
    services: ServiceRules | None = None
    agent_ports: AgentPorts | None = None
    pod_needs: PodNeeds | None = None
    cluster_troubles: Callable[[], Sequence[str]] | None = None

    def __init__(self, pool: PoolConfig | None = None, scheduler: Kind | None = None, **times: Any) -> None:
        self.pool_config = pool or PoolConfig()
        self.clock = Clock()
        self.clock.advance(1000.0)
        self.scheduler = scheduler or Kind()
        self.scheduler.clock = self.clock
        self.store = InlineStore()
        self.store.scheduler = self.scheduler
        self.agents: dict[str, FakeAgent] = {}
        self.endpoints: list[IStreamClientEndpoint | None] = []  # given to `Connect`
        self.table = FakeTable()
        self.dns = cri.DNSConfig()
        self.provider = self.make_provider()
        self.times = Times(watch=WatchTimes(unknown_after=5.0), **times)
        self.begin()

    def _connect(
        self, sandbox_id: str, host: str, port: int, endpoint: IStreamClientEndpoint | None = None
    ) -> IAgent:
        self.endpoints.append(endpoint)
        return cast(IAgent, self.agents[sandbox_id])

    def now(self) -> int:
        """Return the time in nanoseconds since 1970 UTC."""
        return nanoseconds(self.clock)

    def begin(self) -> None:
        """Start a daemon with the fakes and the store as they are."""
        self.logs = self.make_logs()
        self.images = self.make_images()
        self.daemon_clock = DaemonClock(self.clock)
        reactor, inventory = cast(IReactor, self.daemon_clock), Inventory(self.store)
        guests = self.make_guests(inventory)
        features = Features()
        shared = SharedParts(
            reactor,
            inventory,
            features.address_released,
            cast(Authority, FakeAuthority(self.clock)),
            self._connect,
            NodeNames("c", "n"),
            self.times,
            Event(),
            observer=self.observer,
            services=self.services,
            agent_ports=self.agent_ports,
            guests=guests or NoGuests(),
        )
        providers = Providers(partial(NodeProvider, shared), cast(IPodProvider, self.provider))
        self.node_provider = providers.own
        pools = Pools(Pool(self.node_provider, self.pool_config))
        own = Handler("", self.node_provider, MACHINE if self.images.machine_images else DOCKER)
        handlers = Handlers({"": own}, providers, pools)
        self.node = Node(
            reactor,
            shared,
            features,
            providers,
            handlers,
            pools,
            self.images,
            cast(Logs, self.logs),
            self.make_sources(inventory, providers, guests),
            lambda: succeed(self.dns),
            self.pod_needs,
        )
        self.sandboxes, self.containers = self.node.sandboxes, self.node.containers
        self.reconciler = self.node.reconciler
        self.join(*self.make_features())
        self.made()
        contents = self.store.contents()
        at_once(self.node.features.load(contents))
        own_pool = [record for record in contents.pool if not record.handler]
        self.node.pools.own.load(own_pool, contents.settings)
        at_once(self.reconciler.load(contents, _breathe))
        at_once(self.node.features.resume(self.node.inventory))
        self.node.renewal.start()
        self.node.timekeeping.start()

    def make_provider(self) -> FakeProvider:
        """Return the provider, which all daemons share."""
        return FakeProvider(self)

    def make_agent(self, sandbox_id: str) -> FakeAgent:
        """Return the agent of a new VM."""
        return FakeAgent(sandbox_id, self.scheduler)

    def make_images(self) -> FakeImages:
        """Return the images of the daemon that starts."""
        return FakeImages()

    def make_logs(self) -> FakeLogs:
        """Return the logs of the daemon that starts."""
        return FakeLogs()

    def make_features(self) -> list[PodFeature]:
        """Return the features of the pods of the daemon that starts, in order."""
        self.carried = self.make_carried()
        ports = HostPorts(cast(HostPortTable, self.table), unused=lambda port: None)
        host_ports = PodHostPorts(ports, self.node.inventory)
        starts = PodStarts(self.node.reactor, self.node.providers, self.node.inventory)
        network = NetworkChoice(self.node.handlers.network)
        return [NoShadows(), self.carried, network, PodServices(), host_ports, starts]

    def make_carried(self) -> Carried:
        """Return what carries containers' mounts for the daemon that starts."""
        return Carried()

    def make_guests(self, inventory: Inventory) -> Guests | None:
        """Return what takes the place of agents in VMs of the daemon that starts; None: nothing does."""
        return None

    def make_sources(self, inventory: Inventory, providers: Providers, guests: Guests | None) -> BootSources:
        """Return what the VMs of the daemon that starts are booted from, if their images are the VMs."""
        return BootSources(guests=guests)

    def join(self, *features: PodFeature) -> None:
        """Have features join in the pods' lives, after the others."""
        self.node.features.add(*features)

    def made(self) -> None:
        """Hook: called when a daemon has been made and has not yet read its records."""

    def _ended(self, instance: Instance) -> None:
        self.sandboxes.ended(self.node_provider, instance)
        self.node.pools.own.ended(instance)

    @property
    def listing(self) -> Listing:
        """What the CRI's lists are made from."""
        return self.node.listing

    @property
    def container_calls(self) -> ContainerCalls:
        """The CRI's calls of containers."""
        return ContainerCalls(self.listing, self.containers)

    @property
    def sandbox_calls(self) -> SandboxCalls:
        """The CRI's calls of sandboxes."""
        node = self.node
        return SandboxCalls(node.reactor, self.listing, node.providers, node.resizer, self.sandboxes, ())

    @property
    def status_calls(self) -> StatusCalls:
        """The CRI's calls of the runtime's state."""
        return StatusCalls(
            self.node.inventory,
            self.node.providers,
            self.node.handlers,
            services=self.services,
            cluster_troubles=self.cluster_troubles,
        )

    @property
    def control(self) -> ControlService:
        """The calls on the control socket."""
        node = self.node
        parts = node.inventory, node.providers, node.handlers, node.pools, node.reconciler
        return ControlService(*parts, self.cluster_troubles)

    @property
    def description(self) -> DescribeCalls:
        """The calls on the control socket that describe pods."""
        return DescribeCalls(self.node.reactor, self.node.inventory, self.node.providers, self.node.handlers)

    @property
    def shown(self) -> ShownNode:
        """The node as monitoring shows it."""
        return ShownNode(self.node.names, self.node.inventory, self.node.providers, self.node.pools)

    def provider_ready(self) -> None:
        """Report that the provider has started."""
        self.provider.ended = self._ended
        self.node_provider.trouble = ""
        self.node_provider.ready.succeed(None)
        self.node.pools.own.provider_ready()
        self.reconciler.provider_ready(self.node_provider)

    def kill(self) -> None:
        """Kill the daemon; nothing that it was doing goes on or is answered."""
        self.scheduler.killed()
        self.daemon_clock.dead = True
        self.node.stopping.succeed(None)
        self.node.inventory.store = self.node_provider.store = DeadStore()
        self.reconciler.stop()
        self.node.renewal.stop()
        self.node.timekeeping.stop()
        at_once(self.node.features.stop())
        for sandbox in self.node.inventory:
            sandbox.loads.cancel()
            if sandbox.watch is not None:
                sandbox.watch.stop()
        for agent in self.agents.values():
            agent.streams.clear()

    def stop(self) -> None:
        """Stop the daemon as `PodsService.stopService` does: what is under way is left to the next one."""
        self.node.stopping.succeed(None)
        self.reconciler.stop()
        self.node.renewal.stop()
        self.node.timekeeping.stop()
        at_once(self.node.pools.own.stop())
        at_once(self.node.features.stop())
        for sandbox in self.node.inventory:
            sandbox.leave()

    def restart(self) -> None:
        """Kill the daemon, and start the next one and its provider."""
        self.kill()
        self.begin()
        self.provider_ready()

    def wait(self, seconds: float, step: float = 0.25) -> None:
        """Let time pass."""
        for _ in range(int(seconds / step)):
            self.clock.advance(step)


def at_once(work: Coro[None]) -> None:
    """Do what needs no time."""
    done = start(work)
    assert done.called
    done.addErrback(lambda failure: failure.raiseException())


async def _breathe() -> None:
    pass


def lone_sandbox(record: SandboxRecord) -> Sandbox:
    """Return a sandbox outside of any node, which is only read."""
    return Sandbox(record, lambda _: cast(PodMachine, None))


def pod(name: str = "web", uid: str = "u1", attempt: int = 0, **fields: Any) -> cri.PodSandboxConfig:
    """Return a PodSandboxConfig. :param fields: others of its. Any: each has its own type."""
    metadata = cri.PodSandboxMetadata(name=name, uid=uid, namespace="default", attempt=attempt)
    return cri.PodSandboxConfig(metadata=metadata, **fields)


def box(name: str = "main", attempt: int = 0, image: str = "busybox", **fields: Any) -> cri.ContainerConfig:
    """Return a ContainerConfig. :param fields: as in `pod`."""
    metadata = cri.ContainerMetadata(name=name, attempt=attempt)
    return cri.ContainerConfig(metadata=metadata, image=cri.ImageSpec(image=image), **fields)
