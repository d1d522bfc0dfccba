# SPDX-License-Identifier: Apache-2.0
"""What everything in `pods` works with: the collaborators, the settings and the inventory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

import attrs
from twisted.internet.defer import Deferred, DeferredSemaphore, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.authority import Authority
from infranetes.handler_config import CNI, DOCKER, MACHINE
from infranetes.hostports.hostports import HostPorts
from infranetes.images import Image, LayerDisk
from infranetes.machines.agent.client import Connect
from infranetes.machines.agent.container_watch import WatchTimes
from infranetes.machines.context import NodeNames, ServiceRules
from infranetes.observer import NULL_OBSERVER, Observer
from infranetes.overlay.overlay import Overlay
from infranetes.pods import apparmor
from infranetes.pods.handlers import Handler
from infranetes.pods.inventory import Container, Inventory, Sandbox
from infranetes.pods.logs import Logs
from infranetes.pods.network_policies import PodFirewalls
from infranetes.pods.records import ContainerRecord, SandboxRecord
from infranetes.pods.sides import ProviderSide
from infranetes.pods.states import SandboxState
from infranetes.pods.store import Store
from infranetes.providers.interface import IPodProvider
from infranetes_common.concurrency import Event, KeyedLock
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri

if TYPE_CHECKING:
    from infranetes.kubernetes.pod_needs import PodNeeds
    from infranetes.machines.pool import Pool
    from infranetes.machines.renewal import Renewal
    from infranetes.machines.timekeeping import Timekeeping
    from infranetes.pods.shadows import Shadows
    from infranetes.volumes.nfs_volumes import NfsVolumes
    from infranetes.volumes.pod_volumes import PodVolumes
    from infranetes.volumes.volumes import Volumes

DAY = 86400.0
# For the rest of the log of a container that is the VM: its agent ends with it.
MACHINE_DRAIN_SECONDS = 3.0


@attrs.frozen
class Times:
    """How long things may take, in seconds."""

    launch: float = 600.0  # from the first request to a READY sandbox
    desertion: float = 600.0  # that a launch is kept which nobody waits for, in case it is asked for again
    listing: float = 0.25  # that a list waits for VMs whose stream was just lost
    drain: float = 15.0  # the rest of a log, once its container has ended
    stopping: float = 20.0  # stopping the containers of a sandbox that is being stopped
    destroy: float = 120.0  # the provider's part of ending a VM
    sweep: float = 60.0  # between two passes over the provider's list
    exec_limit: float = 3600.0  # an ExecSync without a timeout
    unused: float = 60.0  # that an image without containers is kept in a VM
    certificate: float = DAY  # the validity of a VM's certificate, which is replaced after half of that
    watch: WatchTimes = attrs.field(factory=WatchTimes)


class Images(Protocol):
    """The images of this node: `ImageStore` or `CatalogueStore`."""

    @property
    def machine_images(self) -> bool:
        """Whether the images are whole machines, so that a sandbox has no VM before a container names one."""

    async def find(self, name_or_id: str) -> Image:
        """The image that a reference, an id or the beginning of an id means now.

        :raise NotFound: not pulled on this node. :raise InvalidArgument: ambiguous.
        :raise Unavailable: that can't be told now."""

    def known(self, image_id: str) -> Image | None:
        """What is known of the image without asking anybody; None: nothing."""

    def archive(self, image_id: str, present: int = 0) -> AsyncIterator[bytes]:
        """The image as a tar archive without its lowest `present` layers."""

    async def config(self, image_id: str) -> bytes:
        """The image's configuration, whose digest is its id. :raise NotFound: not on this node any more."""

    async def disks(self, image_id: str) -> Sequence[LayerDisk]:
        """The image's layers as disks, lowest first; those that are missing are made.

        :raise FailedPrecondition: it can't be had as disks. :raise ResourceExhausted: no room for them."""

    def held(self, image_id: str) -> AbstractAsyncContextManager[None]:
        """Keep the files of `disks` until the end of the block, also if the image is removed meanwhile.

        :raise NotFound: not on this node any more."""

    async def check(self, image_id: str) -> None:
        """Forget the image if the catalogue that it was found in no longer has it."""


class TellsOfPods(Protocol):
    """What of `infranetes.kubernetes.pod_events.PodEvents` is needed."""

    def interrupted(self, pod: cri.PodSandboxMetadata, reason: str) -> None:
        """Tell that the VM of a pod's sandbox will be taken away."""

    def moved(self, pod: cri.PodSandboxMetadata) -> None:
        """Tell that a pod has another sandbox than the one that was interrupted."""


def _no_dns() -> Awaitable[cri.DNSConfig]:
    return succeed(cri.DNSConfig())


class NodeContext:
    """The collaborators of `pods` as one object.

    :param store: open. :param images: where containers' images are. :param authority: issues the VMs'
        certificates. :param connect: makes the agents' clients. :param logs: writes the containers' log
        files. :param volumes: carries their mounts. :param hostports: leads ports of the node to pods.
    :param parallel: how many agents are connected to at once.
    :param provider: the node's own, of pods whose handler names none.
    :ivar side: that of the node's own provider. :ivar sides: those of all providers, by their names.
    :ivar pool: VMs that wait for a pod. :ivar renewal: replaces certificates. :ivar timekeeping: keeps VMs'
        clocks right. All three are set before use.
    :ivar pools: those of handlers that have their own.
    :ivar apparmor: the directory of the node's AppArmor profiles.
    :ivar contprovider: what runs containers of pods that choose nothing; "": what the VMs' image has first.
    :ivar handlers: by their names; "": the node's own.
    :ivar image_source: where pods are of several kinds, what says whose an image is: the name of the kind, of
        a machine image that of the provider.
    :ivar services: the cluster's Services; None: the VMs are not told of them.
    :ivar firewalls: keeps the pods' NetworkPolicies in force; None: they don't hold.
    :ivar overlay: gives the pods of those sides that have it addresses of the pods' network.
    :ivar pod_needs: knows what pods request beyond what the CRI says; None: nobody does.
    :ivar shadows: have the node's CNI give pods its network, where there is a delegate.
    :ivar pod_volumes: attaches the volumes that kubelet has published; None: there are none.
    :ivar nfs_volumes: has VMs mount what NFS servers export; None: it is carried as files are.
    :ivar pod_events: tells Kubernetes what happens to pods; None: nobody is told.
    :ivar network: of pods that say nothing of it, where there is an overlay: one of annotations' NETWORKS.
    :ivar resizing: held while a sandbox's VM is made larger or smaller, by its id.
    :ivar dns: gives the node's own DNS, for pods that name none.
    :ivar observer: is told of launches, calls and losses.
    """

    pool: Pool
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
        volumes: Volumes,
        hostports: HostPorts,
        names: NodeNames,
        times: Times = Times(),
        parallel: int = 64,
    ) -> None:
        self.reactor = reactor
        self.clock: IReactorTime = reactor
        self.resizing: KeyedLock[str] = KeyedLock()
        self.store = store
        self.side = ProviderSide(self, provider)
        self.sides = {self.side.name: self.side}
        self.images = images
        self.authority = authority
        self.connect = connect
        self.logs = logs
        self.volumes = volumes
        self.hostports = hostports
        self.names = names
        self.apparmor = apparmor.DEFAULT_DIRECTORY
        self.contprovider = ""
        self.pools: list[Pool] = []
        self.handlers = {"": Handler("", self.side, MACHINE if images.machine_images else DOCKER)}
        self.image_source: Callable[[str], str] | None = None
        self.services: ServiceRules | None = None
        self.firewalls: PodFirewalls | None = None
        self.overlay: Overlay | None = None
        self.pod_needs: PodNeeds | None = None
        self.shadows: Shadows | None = None
        self.pod_volumes: PodVolumes | None = None
        self.nfs_volumes: NfsVolumes | None = None
        self.pod_events: TellsOfPods | None = None
        self.network = "vpc"
        self.dns: Callable[[], Awaitable[cri.DNSConfig]] = _no_dns
        self.observer: Observer = NULL_OBSERVER
        self.times = times
        self.inventory = Inventory()
        self.gate = DeferredSemaphore(parallel)  # held while an agent is connected to
        self.stopping = False  # the daemon ends: what is under way is left for the next one
        self._log = Logger()

    def now(self) -> int:
        """Nanoseconds since 1970 UTC."""
        return int(self.clock.seconds() * 1e9)

    def save(self, sandbox: Sandbox, record: SandboxRecord) -> Deferred[None]:
        """Make `record` the sandbox's, in memory at once; fires when it is on the disk."""
        if record.state is SandboxState.ABANDONED:
            self.inventory.release_name(sandbox)
        sandbox.record = record
        return self.store.put_sandbox(record)

    async def commit(self, sandbox: Sandbox, record: SandboxRecord) -> None:
        """Make `record` the sandbox's once it is on the disk."""
        await self.store.put_sandbox(record)
        sandbox.record = record

    def save_container(self, container: Container, record: ContainerRecord) -> Deferred[None]:
        """Make `record` the container's, in memory at once; fires when it is on the disk."""
        container.record = record
        return self.store.put_container(record)

    def add_side(self, provider: IPodProvider) -> ProviderSide:
        """Have another provider on this node."""
        side = self.sides[provider.name] = ProviderSide(self, provider)
        return side

    def side_of(self, record: SandboxRecord) -> ProviderSide:
        """The side that has the sandbox's VM. There is one for every record once they are loaded."""
        return self.sides[record.provider] if record.provider else self.side

    def started(self, sandbox: Sandbox) -> Event[None]:
        """What happens once the provider of a sandbox's VM has started."""
        return self.side_of(sandbox.record).ready

    def handler_named(self, name: str) -> Handler:
        """What a runtime handler means; one that is configured no more means what the node's own does."""
        return self.handlers.get(name) or self.handlers[""]

    def handler_of(self, record: SandboxRecord) -> Handler:
        """What a sandbox's handler meant when it was made."""
        return self.handler_named(record.runtime_handler).recorded(record, self.side_of(record))

    def pool_for(self, handler: Handler) -> Pool | None:
        """The pool whose VMs its pods may have: its own, or the node's if its VMs are made as those."""
        own = self.handlers[""]
        like_own = handler.side is own.side and handler.kind == own.kind and not handler.annotations.set
        return handler.pool or (self.pool if like_own and handler.network != CNI else None)

    def all_pools(self) -> list[Pool]:
        """Every pool, the node's own first."""
        return [self.pool, *self.pools]

    def pools_of(self, side: ProviderSide) -> list[Pool]:
        """The pools of VMs of a side."""
        return [pool for pool in self.all_pools() if pool.context is side]

    @property
    def trouble(self) -> str:
        """Why no provider can be asked for VMs; "": at least one can."""
        troubles = [(side.name, side.trouble) for side in self.sides.values()]
        if not all(trouble for _, trouble in troubles):
            return ""
        if len(troubles) == 1:
            return troubles[0][1]
        return "; ".join(f"provider {name}: {trouble}" for name, trouble in troubles)

    def note(self, write: Deferred[None], what: str) -> None:
        """Let a write go on by itself, and log if it fails: what it records can be learnt again."""
        write.addErrback(lambda failure: self._log.error("{what} was not recorded: {error}",
                                                         what=what, error=failure.value))  # fmt: skip
