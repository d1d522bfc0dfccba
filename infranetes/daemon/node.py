# SPDX-License-Identifier: Apache-2.0
"""The pods of a node: every object of `infranetes.pods`, made here of what it needs, and only of that."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from twisted.internet.defer import DeferredSemaphore

from infranetes.kubernetes.pod_needs import PodNeeds
from infranetes.machines.renewal import Renewal
from infranetes.machines.timekeeping import Timekeeping
from infranetes.pods.containers.containers import Containers
from infranetes.pods.containers.creation import ContainerCreation
from infranetes.pods.containers.profiles import SecurityProfiles
from infranetes.pods.containers.start import ContainerStart
from infranetes.pods.containers.stop import ContainerStop
from infranetes.pods.images.image_loads import ImageLoads
from infranetes.pods.images.layer_loads import LayerLoads
from infranetes.pods.images.removal import UnusedImages
from infranetes.pods.node import apparmor
from infranetes.pods.node.handlers import Handlers
from infranetes.pods.node.hooks import Features
from infranetes.pods.node.images import Images
from infranetes.pods.node.logs import Logs
from infranetes.pods.node.node_providers import Providers, SharedParts
from infranetes.pods.node.pools import Pools
from infranetes.pods.reconcile import Reconciler
from infranetes.pods.sandboxes.launch import Dns, Launches
from infranetes.pods.sandboxes.machine_images import BootSources, MachineImages
from infranetes.pods.sandboxes.sandboxes import Sandboxes
from infranetes.pods.sandboxes.stop import ContainersEnd
from infranetes.pods.vm.agent_events import AgentConnections, AgentListener
from infranetes.pods.vm.listing import Listing
from infranetes.pods.vm.reports import ContainerReports
from infranetes.pods.vm.resize import Resizer
from infranetes.pods.vm.sandbox_vm import reachable_machines
from infranetes.pods.vm.vm_size import RequestedSizes
from infranetes_common.reactors import IReactor


class Node:
    """The pods of a node. Only the assembly has it: each object gets its own collaborators.

    :param shared: what the machines of all providers share, of which much is the pods' as well.
    :param features: join in the pods' lives.
    :param images: holds the containers' images. :param logs: writes the containers' log files.
    :param sources: what VMs are booted from whose image is the VM.
    :param dns: returns the node's own DNS settings, for pods that have none.
    :param pod_needs: knows what pods request beyond what the CRI carries; None: nothing does.
    :param apparmor_dir: the directory of the node's AppArmor profiles.
    :param parallel: how many agents are connected to at once.
    """

    def __init__(
        self,
        reactor: IReactor,
        shared: SharedParts,
        features: Features,
        providers: Providers,
        handlers: Handlers,
        pools: Pools,
        images: Images,
        logs: Logs,
        sources: BootSources,
        dns: Dns,
        pod_needs: PodNeeds | None = None,
        apparmor_dir: Path = apparmor.DEFAULT_DIRECTORY,
        parallel: int = 64,
    ) -> None:
        inventory, times = shared.inventory, shared.times
        observer, stopping = shared.observer, shared.stopping
        self.reactor, self.names, self.times, self.stopping = reactor, shared.names, times, stopping
        self.inventory, self.features, self.logs = inventory, features, logs
        self.providers, self.handlers, self.pools = providers, handlers, pools

        reachable = partial(reachable_machines, inventory, pools)
        self.renewal = renewal = Renewal(providers.own, reachable)
        self.timekeeping = Timekeeping(reactor, reachable)
        self.listing = Listing(reactor, inventory, times.listing)

        reports = ContainerReports(reactor, inventory, logs, features)
        listener = partial(AgentListener, reactor, inventory, providers, features, observer, reports)
        gate = DeferredSemaphore(parallel)
        connections = AgentConnections(reactor, features, reports, gate, times.watch, listener)
        sizes = RequestedSizes(handlers, pod_needs)
        self.connections = connections
        self.resizer = resizer = Resizer(reactor, inventory, providers, sizes)

        vms = inventory, providers, handlers, features
        ends = ContainersEnd(reactor, logs, reports, times.drain, times.stopping)
        self.launches = launches = Launches(
            reactor,
            inventory,
            handlers,
            features,
            observer,
            connections,
            renewal,
            dns,
            times.launch,
            stopping,
        )
        self.sandboxes = sandboxes = Sandboxes(
            reactor, *vms, sizes, connections, launches, ends, times.desertion, stopping
        )
        self.machine_images = machine_images = MachineImages(
            *vms, images, launches, connections, dns, stopping, sources
        )

        written = reactor, inventory, logs, features
        image_loads = ImageLoads(reactor, images, providers, LayerLoads(reactor, images, providers))
        unused_images = UnusedImages(reactor, images, providers, times.unused, stopping)
        creation = ContainerCreation(
            reactor,
            inventory,
            images,
            handlers,
            features,
            SecurityProfiles(reactor, apparmor_dir),
            image_loads,
            unused_images,
            resizer,
            machine_images,
            stopping,
        )
        start = ContainerStart(*written, reports)
        stop = ContainerStop(*written, times.drain, reports, unused_images, sandboxes, machine_images)
        self.containers = containers = Containers(
            *written, times.exec_limit, sandboxes, creation, start, stop, resizer, reports
        )
        self.reconciler = Reconciler(
            reactor,
            inventory,
            providers,
            pools,
            features,
            observer,
            connections,
            sandboxes,
            containers,
            machine_images,
            times.sweep,
            times.destroy,
        )

    def known_key(self, id: str) -> str:
        """Return the key of the certificate that a VM was last given; "" if the VM is unknown."""
        sandbox = self.inventory.sandboxes.get(id)
        if sandbox is not None:
            return sandbox.record.certificate_key
        members = (pool.members.get(id) for pool in self.pools.all())
        return next((member.record.certificate_key for member in members if member is not None), "")
