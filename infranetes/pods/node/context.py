# SPDX-License-Identifier: Apache-2.0
"""The context shared by everything in `pods`: the collaborators, the settings and the inventory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Protocol

from twisted.internet.defer import DeferredSemaphore, succeed
from twisted.internet.interfaces import IReactorTime

from infranetes.firewalls.agent_ports import AgentPorts
from infranetes.identity.authority import Authority
from infranetes.images import Image, LayerDisk
from infranetes.machines.context import NodeNames, ServiceRules
from infranetes.machines.interface import Connect
from infranetes.observer import NULL_OBSERVER, Observer
from infranetes.pods.node import apparmor
from infranetes.pods.node.handler_config import DOCKER, MACHINE
from infranetes.pods.node.handlers import Handler, Handlers
from infranetes.pods.node.hooks import Features
from infranetes.pods.node.inventory import Inventory
from infranetes.pods.node.logs import Logs
from infranetes.pods.node.pools import Pools
from infranetes.pods.node.sides import GuestAgents, NoGuests, Providers, ProviderSide
from infranetes.pods.node.times import Times
from infranetes.pods.store.store import Store
from infranetes.providers.interface import IPodProvider
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri

if TYPE_CHECKING:
    from infranetes.kubernetes.pod_needs import PodNeeds
    from infranetes.machines.renewal import Renewal
    from infranetes.machines.timekeeping import Timekeeping


class Images(Protocol):
    """The images of this node: `ImageStore` or `CatalogueStore`."""

    @property
    def machine_images(self) -> bool:
        """Whether the images are whole machines: a sandbox then has no VM until a container names one."""

    async def find(self, name_or_id: str) -> Image:
        """Return the image that a reference, an id or a prefix of an id means now.

        :raise NotFound: it is not pulled on this node. :raise InvalidArgument: it is ambiguous.
        :raise Unavailable: this can't be determined now."""

    def cached(self, image_id: str) -> Image | None:
        """Return the image if it is known without any I/O, or None."""

    def archive(self, image_id: str, present: int = 0) -> AsyncIterator[bytes]:
        """Iterate over the image as a tar archive, without its lowest `present` layers."""

    async def config(self, image_id: str) -> bytes:
        """Return the image's configuration, whose digest is its id.

        :raise NotFound: the image is no longer on this node."""

    async def disks(self, image_id: str) -> Sequence[LayerDisk]:
        """Return the image's layers as disks, lowest first, making those that are missing.

        :raise FailedPrecondition: the image can't be made into disks.
        :raise ResourceExhausted: there is no room for them."""

    def held(self, image_id: str) -> AbstractAsyncContextManager[None]:
        """Keep the files of `disks` until the end of the block, even if the image is removed meanwhile.

        :raise NotFound: the image is no longer on this node."""

    async def check(self, image_id: str) -> None:
        """Forget the image if the catalogue that it was found in no longer has it."""


def _no_dns() -> Awaitable[cri.DNSConfig]:
    return succeed(cri.DNSConfig())


class NodeContext:
    """The collaborators of `pods` as one object.

    :param store: the store, already open. :param images: holds the containers' images.
    :param authority: issues the VMs' certificates. :param connect: makes the agents' clients.
    :param logs: writes the containers' log files.
    :param parallel: how many agents are connected to at once.
    :param provider: the node's own provider, for pods whose handler names none.
    :ivar providers: the node's providers. :ivar pools: VMs that wait for a pod.
    :ivar renewal: replaces certificates. :ivar timekeeping: keeps VMs' clocks right. Both are set before use.
    :ivar apparmor: the directory of the node's AppArmor profiles.
    :ivar contprovider: the ContainerProvider of pods that choose none; "": the first one of the VMs' image.
    :ivar handlers: the runtime handlers.
    :ivar services: the cluster's Services; None: the VMs do not learn them.
    :ivar features: join in the pods' lives.
    :ivar agent_ports: keeps others from the agents of VMs in networks of others; None: nothing does here.
    :ivar guests: makes what takes the place of agents in VMs without one.
    :ivar pod_needs: knows what pods request beyond what the CRI carries; None: nothing does.
    :ivar network: where there is an overlay, the network (one of NETWORKS) of pods that choose none.
    :ivar dns: returns the node's own DNS settings, for pods that have none.
    :ivar observer: is notified of launches, calls and losses.
    """

    renewal: Renewal
    timekeeping: Timekeeping

    def __init__(
        self,
        reactor: IReactor,
        store: Store,
        provider: IPodProvider,
        images: Images,
        authority: Authority,
        connect: Connect,
        logs: Logs,
        names: NodeNames,
        times: Times = Times(),
        parallel: int = 64,
    ) -> None:
        self.reactor = reactor
        self.clock: IReactorTime = reactor
        self.store = store
        self.providers = Providers(ProviderSide(self, provider), partial(ProviderSide, self))
        self.images = images
        self.authority = authority
        self.connect = connect
        self.logs = logs
        self.names = names
        self.apparmor = apparmor.DEFAULT_DIRECTORY
        self.contprovider = ""
        self.pools = Pools()
        own = Handler("", self.providers.own, MACHINE if images.machine_images else DOCKER)
        self.handlers = Handlers(own, self.providers, self.pools)
        self.services: ServiceRules | None = None
        self.cluster_troubles: Callable[[], Sequence[str]] | None = None
        self.features = Features()
        self.agent_ports: AgentPorts | None = None
        self.guests: GuestAgents = NoGuests()
        self.pod_needs: PodNeeds | None = None
        self.network = "vpc"
        self.dns: Callable[[], Awaitable[cri.DNSConfig]] = _no_dns
        self.observer: Observer = NULL_OBSERVER
        self.times = times
        self.inventory = Inventory(store)
        self.gate = DeferredSemaphore(parallel)  # held while connecting to an agent
        self.stopping = False  # the daemon is stopping: it leaves unfinished work to the next one

    def until(self, limit: float | None) -> float:
        """Return the time of the clock `limit` seconds from now; None: 0."""
        return 0.0 if limit is None else self.clock.seconds() + limit

    def now(self) -> int:
        """Return the time in nanoseconds since 1970 UTC."""
        return int(self.clock.seconds() * 1e9)
