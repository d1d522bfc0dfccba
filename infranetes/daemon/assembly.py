# SPDX-License-Identifier: Apache-2.0
"""The node daemon: every object is made here, given to those that use it, and started in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from twisted.application.service import Service
from twisted.internet.defer import Deferred

from infranetes.config import Config, Reading
from infranetes.config.in_force import ConfigInForce
from infranetes.config.schema import ADDRESSING
from infranetes.control.checkpoints import CheckpointCalls
from infranetes.control.config import ConfigCalls
from infranetes.control.describe import DescribeCalls
from infranetes.control.enter import EnterCalls
from infranetes.control.kept import KeptCalls
from infranetes.control.metrics import MetricsCalls
from infranetes.control.policies import PolicyCalls
from infranetes.control.screens import ScreenCalls
from infranetes.control.server import control_server
from infranetes.control.service import ControlService
from infranetes.control.services import ServiceCalls
from infranetes.control.sizes import SizeCalls
from infranetes.control.sleep import SleepCalls
from infranetes.control.usage import UsageCalls
from infranetes.control.volumes import VolumeCalls
from infranetes.cri.images import ImageService
from infranetes.cri.instrument import logged
from infranetes.cri.runtime import RuntimeService
from infranetes.cri.status import StatusCalls
from infranetes.cri.traced import traced
from infranetes.csi.publisher import Publisher
from infranetes.daemon.backends import MakeProvider, make_backends
from infranetes.daemon.claims import StateLock, clear_socket, make_directories
from infranetes.daemon.cluster import (
    make_api_server,
    make_node_proxies,
    make_overlay,
    make_policies,
    make_services,
)
from infranetes.daemon.csi import CsiService, MountedVolumes, no_volumes, volumes_of
from infranetes.daemon.delegate import delegate_service, make_router
from infranetes.daemon.handlers import check_pools, make_handlers
from infranetes.daemon.metrics import make_observer, monitoring
from infranetes.daemon.node import Node
from infranetes.daemon.pods_service import PodsService
from infranetes.daemon.provider_start import ProviderStart
from infranetes.daemon.service_manager import ServiceManager
from infranetes.daemon.sockets import SocketService
from infranetes.delegate.node_images import NodeImages
from infranetes.delegate.shadow import ShadowSandboxes
from infranetes.firewalls.agent_ports import AgentPorts
from infranetes.firewalls.agent_ports import table_name as agents_table
from infranetes.hostports.hostports import HostPorts, table_name
from infranetes.hostports.table import HostPortTable
from infranetes.identity.authority import Authority, KnownKey
from infranetes.identity.guest_keys import GuestSecrets
from infranetes.identity.node_addresses import sources
from infranetes.images.catalogues import CatalogueSet
from infranetes.images.several import container_images
from infranetes.kubernetes.cluster import troubles
from infranetes.kubernetes.config_objects import ApiServerObjects
from infranetes.kubernetes.pod_events import PodEvents
from infranetes.kubernetes.pod_needs import ApiServerNeeds
from infranetes.machines.agent.client import connector
from infranetes.machines.agent.container_watch import WatchTimes
from infranetes.machines.agentless.configuration import PodFacts
from infranetes.machines.context import NodeNames
from infranetes.machines.sandbox_memory import SandboxMemory
from infranetes.machines.sleeping import SleepGate
from infranetes.monitoring.gauges import ShownNode
from infranetes.pods.containers.lifelog import log_container_events
from infranetes.pods.features.agent_ports import AgentPortRules
from infranetes.pods.features.attestation import Attestation, Judge, Vouched
from infranetes.pods.features.distinct_addresses import DistinctAddresses
from infranetes.pods.features.guest_addresses import GuestAddresses
from infranetes.pods.features.guests import Guests
from infranetes.pods.features.host_ports import PodHostPorts
from infranetes.pods.features.network_policies import FirewallEnforcer, PodFirewalls
from infranetes.pods.features.overlay import NetworkChoice, PodOverlay
from infranetes.pods.features.pod_events import PodEventReports
from infranetes.pods.features.services import PodServices
from infranetes.pods.features.shadows import NoShadows, Shadows
from infranetes.pods.features.starts import PodStarts
from infranetes.pods.keeping.checkpoints import Checkpoints
from infranetes.pods.keeping.clones import Clones
from infranetes.pods.keeping.keep_as import KeepAsFeature, KeptCollection
from infranetes.pods.keeping.keeper import PodKeeper
from infranetes.pods.keeping.starts import KeptStarts
from infranetes.pods.keeping.states import KeptStates
from infranetes.pods.node.handler_config import MACHINE
from infranetes.pods.node.hooks import Features, PodFeature
from infranetes.pods.node.inventory import Inventory
from infranetes.pods.node.logs import Logs
from infranetes.pods.node.node_providers import NodeProvider, NoGuests, Providers, SharedParts
from infranetes.pods.node.times import Times
from infranetes.pods.sandboxes.machine_images import BootSources
from infranetes.pods.sleeping.command_probes import CommandProbes
from infranetes.pods.sleeping.connection_probes import ConnectionProbes
from infranetes.pods.sleeping.idleness import SleepyPods
from infranetes.pods.sleeping.probe_table import ProbeTable
from infranetes.pods.sleeping.probe_table import table_name as probes_table
from infranetes.pods.sleeping.sleep import PodSleep
from infranetes.pods.store.store import Store
from infranetes.pods.streams import Streams
from infranetes.pods.vm.node_names import node_dns
from infranetes.providers import registry
from infranetes.providers.hypervisor import IBootsGuests
from infranetes.providers.interface import IInVpc, IPodProvider
from infranetes.stats.gather import Gatherer
from infranetes.streaming.server import StreamingServer
from infranetes.tracing.make import make_tracer
from infranetes.volumes.nfs_volumes import NfsMounts, NfsVolumes
from infranetes.volumes.pod_volumes import PodVolumes
from infranetes.volumes.published_mounts import PublishedMounts
from infranetes.volumes.volumes import Volumes
from infranetes_common import errors
from infranetes_common.concurrency import Event, deferred, run_in_thread, settled
from infranetes_common.config_files import Sources
from infranetes_common.nanoseconds import nanoseconds
from infranetes_common.reactors import IReactor
from infranetes_common.services import OrderedServices, StartStop
from infranetes_common.wire.control_rpcs import control_service
from infranetes_common.wire.cri_rpcs import image_service
from txgrpc import Server

SOCKET_MODE = 0o660
CONTROL_MODE = 0o600


class Daemon(OrderedServices):
    """One node's runtime: a service for each of its parts.

    What can fail at once does so when it is made: directories, the lock of the state directory, the sockets'
    paths, the CA. Nothing is served before `startService`, which fires once the CRI socket answers. That is
    before the provider has started: until then Status says what it waits for.

    :param manager: the service manager to be notified. :param make_provider: makes the provider.
    :param source: the configuration's file, which errors name.
    :param config_in_force: what is shown of the configuration.
    :raise InfranetesError: what is in the way, and what to do.
    """

    def __init__(
        self,
        reactor: IReactor,
        config: Config,
        manager: ServiceManager | None = None,
        make_provider: MakeProvider = registry.create,
        source: str = "configuration",
        config_in_force: ConfigInForce | None = None,
    ) -> None:
        super().__init__()
        self._reactor = reactor
        self._config = config
        self._make_provider = make_provider
        self._source = source
        self._config_in_force = config_in_force or ConfigInForce(Reading(config, Sources(source)))
        self._manager = manager or ServiceManager()
        self._observer, metrics = make_observer(config)
        self._tracer = make_tracer(reactor, config.tracing, config.node, source)
        self._backends = make_backends(reactor, config, make_provider, source, self._observer)
        make_directories(config)
        lock = StateLock(config.state_dir)
        clear_socket(config.socket_path)
        clear_socket(config.control_socket)
        server = self._api_server = make_api_server(reactor, config)
        self._policies = make_policies(reactor, config, server)
        self._services = make_services(reactor, config, server)
        self._pod_events = PodEvents(reactor, server, config.node) if server is not None else None
        self._node = self._make_node()
        self._pods = PodsService(self._node, self._backends.make)
        self._node.features.add(*(feature for feature in self._make_features() if feature is not None))
        volumes, mounted = (
            volumes_of(self._backends.providers, config.providers),
            MountedVolumes(self._volumes),
        )
        self._publisher = Publisher(reactor, volumes, mounted) if volumes is not None else None
        self._provider_start = ProviderStart(
            reactor, self._node.providers, self._pods, self._manager, self._backends.delegate is not None
        )
        self._add("lock", lock)
        self._metrics = None
        if metrics is not None:  # so that it serves while the rest starts
            node = self._node
            shown = ShownNode(node.names, node.inventory, node.providers, node.pools)
            self._metrics = monitoring(reactor, config, shown, metrics)
            self._add("metrics", self._metrics)
        self._add_in_order()

    def _cluster_troubles(self) -> Callable[[], Sequence[str]] | None:
        """Return what tells why objects of the cluster can't be followed; None: none are."""
        followed = [source for source in (self._services, self._policies) if source is not None]
        return partial(troubles, followed) if followed else None

    def _make_node(self) -> Node:
        reactor, config = self._reactor, self._config
        self._gate = SleepGate()
        authority = Authority(config.state_dir, path=config.ca, sources=sources(config.node_addresses))
        store = Store(reactor, config.state_dir)
        inventory = Inventory(store)
        log_container_events(inventory, reactor)
        self._agent_ports = AgentPorts(reactor, agents_table(config.state_dir))
        self._published, self._nfs = PublishedMounts(reactor), NfsMounts(reactor)
        self._overlay = make_overlay(reactor, config, self._backends.providers)
        rules = self._services if self._backends.machines is not None else None
        self._node_proxies = make_node_proxies(reactor, self._backends.providers, rules)
        self._guests = self._make_guests(inventory)
        features = Features()
        shared = SharedParts(
            reactor,
            inventory,
            features.address_released,
            authority,
            connector(reactor, authority, self._known_key, self._gate),
            NodeNames(config.cluster, config.node),
            times(config),
            Event(),
            observer=self._observer,
            contprovider=config.contprovider,
            services=self._services,
            agent_ports=self._agent_ports,
            guests=self._guests or NoGuests(),
        )
        providers = Providers(partial(self._make_node_provider, shared), *self._backends.providers)
        handlers, pools = make_handlers(providers, self._backends.images, config, self._source)
        self._volumes = PodVolumes(reactor, inventory, providers, self._published)
        server = self._api_server
        return Node(
            reactor,
            shared,
            features,
            providers,
            handlers,
            pools,
            self._backends.images,
            Logs(reactor, store),
            BootSources(self._backends.machines, self._volumes, self._guests),
            partial(run_in_thread, reactor, node_dns),
            pod_needs=ApiServerNeeds(reactor, server) if server is not None else None,
            apparmor_dir=config.apparmor_dir,
            parallel=config.parallel_agents,
        )

    def _known_key(self, sandbox_id: str) -> KnownKey:
        return KnownKey(self._node.known_key(sandbox_id), self._attestation.key(sandbox_id))

    def _make_node_provider(self, shared: SharedParts, provider: IPodProvider) -> NodeProvider:
        in_vpc = IInVpc.providedBy(provider)
        addressing = [other.name for other in self._backends.providers if other.name in ADDRESSING]
        return NodeProvider(
            shared,
            provider,
            self._overlay if in_vpc else None,
            self._node_proxies.get(provider.name),
            gets_subnet=in_vpc or provider.name not in addressing[1:],  # only one of these gets it
        )

    def _make_features(self) -> Iterable[PodFeature | None]:
        """Make the features of pods, in the order of `infranetes.pods.node.hooks`; None: one that this node
        lacks."""
        reactor, config, node = self._reactor, self._config, self._node
        inventory, providers, handlers = node.inventory, node.providers, node.handlers
        self._firewalls = None
        if self._policies is not None:
            enforcer = FirewallEnforcer(providers.of)
            self._firewalls = PodFirewalls(reactor, self._policies, enforcer, providers.started)
        shadows: PodFeature = NoShadows()
        if (delegate := self._backends.delegate) is not None:
            runtime = ShadowSandboxes(delegate, str(config.state_dir))
            shadows = Shadows(inventory, runtime, node.sandboxes.lost, node.sandboxes.end_abandoned)
        self._kept = states = KeptStates(reactor, config.state_dir / "kept")
        self._keeper = PodKeeper(
            reactor, inventory, providers, handlers, node.features, states, node.stopping
        )
        command_probes = CommandProbes(reactor, handlers, self._gate)
        probe_table = ProbeTable(reactor, probes_table(config.state_dir))
        probes = ConnectionProbes(reactor, probe_table, command_probes.seconds, self._gate.awake)
        self._sleep = PodSleep(
            reactor, inventory, providers, self._gate, self._keeper.is_held, probes, node.stopping
        )
        vouched = SandboxMemory(reactor, config.state_dir / "attested", Vouched)
        self._attestation = Attestation(reactor, handlers.of, vouched, self._make_judge())
        clones = Clones(reactor, config.state_dir / "kept" / "pods")
        host_ports = HostPorts(HostPortTable(reactor, table_name(config.state_dir)))
        return (
            PodStarts(reactor, providers, inventory),
            self._attestation,
            shadows,
            DistinctAddresses(inventory),
            self._guests,
            GuestAddresses(reactor, handlers.of, self._pod_events) if self._guests is not None else None,
            KeptStarts(reactor, inventory, handlers, node.features, states, clones),
            NfsVolumes(reactor, self._nfs.find),
            self._volumes,
            Volumes(reactor, config.state_dir / "volumes", config.volumes),
            self._keeper,
            KeepAsFeature(reactor, inventory, providers, handlers, states, self._keeper),
            KeptCollection(reactor, states, config.kept, node.times.launch),
            self._sleep,
            SleepyPods(reactor, inventory, providers, handlers, self._gate, self._sleep, probes.sent),
            command_probes,
            probes,
            NetworkChoice(handlers.network),
            PodOverlay(self._overlay, inventory, providers, handlers) if self._overlay is not None else None,
            self._firewalls,
            PodServices(),
            AgentPortRules(self._agent_ports),
            PodHostPorts(host_ports, inventory),
            PodEventReports(self._pod_events, handlers.of) if self._pod_events is not None else None,
        )

    def _make_judge(self) -> Judge | None:
        """Make what has reports on confidential VMs judged; None: nobody judges them."""
        if not self._config.attestation.url:
            return None
        from infranetes.attestation.verifier import Verifier  # late: with it come HTTP and TLS of treq

        return Verifier(self._reactor, self._config.attestation)

    def _make_guests(self, inventory: Inventory) -> Guests | None:
        """Make what takes the place of agents in VMs without one; None: there are no such VMs.

        Much of what it asks is made later, as that needs the agents: it is looked up when it is asked."""
        config, machines = self._config, self._backends.machines
        clouds = {provider.name for provider in self._backends.providers if IBootsGuests.providedBy(provider)}
        handlers = ("", *config.handlers)
        if machines is None and not any(
            config.kind_of(handler) == MACHINE and config.provider_of(handler) in clouds
            for handler in handlers
        ):
            return None
        from infranetes.daemon.guests import NodeGuests  # imports the reactor, which is chosen by now

        state_dir = self._config.state_dir
        memory = SandboxMemory(self._reactor, state_dir / "guests", PodFacts)
        server = self._api_server
        objects = ApiServerObjects(self._reactor, server) if server is not None else None
        makers = NodeGuests(self._reactor, GuestSecrets(state_dir), objects)
        return Guests(
            self._reactor,
            inventory,
            lambda record: self._node.handlers.of(record),
            memory,
            makers,
            lambda sandbox, message: self._node.sandboxes.lost(sandbox, message),
            partial(nanoseconds, self._reactor),
            lambda sandbox_id: self._volumes.root_of(sandbox_id),
        )

    def _add_in_order(self) -> None:
        """Add the services. Each is started after those above it, and stopped before them."""
        node, backends, config = self._node, self._backends, self._config
        where = config.streaming
        streams = StreamingServer(
            self._reactor,
            Streams(self._node.sandboxes, self._node.containers),
            host=where.host,
            port=where.port,
            advertise=where.advertise,
        )
        self._add("tracing", StartStop(on_stop=self._tracer.stop))
        self._add("agents' ports", StartStop(on_stop=self._agent_ports.stop))
        checkpoints = config.state_dir / "checkpoints"
        self._checkpoints = Checkpoints(self._reactor, checkpoints, node.providers, self._node.containers)
        self._add("checkpoints", StartStop(self._checkpoints.start))
        store = node.inventory.store
        self._add("store", StartStop(on_stop=store.close))  # opened with the pods, but closed after them
        self._add("published volumes", StartStop(on_stop=self._published.close))
        self._add("NFS mounts", StartStop(on_stop=self._nfs.close))
        if self._publisher is not None:
            self._add("publisher of volumes", StartStop(on_stop=self._publisher.close))
        if backends.delegate is not None:
            self._add("delegate", delegate_service(backends.delegate))
        self._add("image store", StartStop(backends.start_images, backends.stop_images))
        self._add("providers", StartStop(on_stop=self._stop_providers))  # only stopped here: they start last
        if self._services is not None:
            self._add("services", self._services)
        for proxy in self._node_proxies.values():
            self._add("services on the node", StartStop(proxy.start, proxy.stop))
        if self._policies is not None:
            self._add("policies", self._policies)
        if self._pod_events is not None:
            self._add("pod events", self._pod_events)
        self._add("pods", self._pods)
        self._add("streaming server", StartStop(streams.start, streams.stop))
        self._add("control socket", self._control_socket())
        self._add("CRI socket", self._cri_socket(streams))
        if self._config.csi.kubelet_dir:
            self._add("volume driver", self._volume_driver())
        self._add("start of the provider", self._provider_start)

    @deferred
    async def _stop_providers(self) -> None:
        await settled(node_provider.provider.stop() for node_provider in self._node.providers)

    def _add(self, name: str, service: Service) -> None:
        service.setName(name)
        service.setServiceParent(self)

    def _control_socket(self) -> SocketService:
        node = self._node
        pods = ControlService(
            node.inventory,
            node.providers,
            node.handlers,
            node.pools,
            node.reconciler,
            self._cluster_troubles(),
        )
        services = ServiceCalls(self._reactor, node.inventory, self._services)
        policies = PolicyCalls(node.inventory, self._policies, self._firewalls)
        volumes = VolumeCalls(self._publisher, self._config.volumes.flexvolumes)
        sizes, settings = SizeCalls(node.providers), ConfigCalls(self._reactor, self._config_in_force)
        description = DescribeCalls(self._reactor, node.inventory, node.providers, node.handlers)
        usage = UsageCalls(
            self._reactor,
            node.inventory,
            node.providers,
            Gatherer(self._reactor, node.listing),
        )
        self._serve_kubectl(pods, description, usage)
        self._show_pods(pods, description, policies)
        figures = MetricsCalls(self._metrics.exposition if self._metrics is not None else None)
        shells = EnterCalls(self._reactor, node.inventory, self._may_enter)
        screens = ScreenCalls(self._reactor, node.inventory, node.providers, self._may_enter)
        calls = control_service(
            pods,
            description,
            usage,
            shells,
            screens,
            CheckpointCalls(node.inventory, self._checkpoints),
            KeptCalls(self._reactor, node.inventory, self._kept, self._keeper),
            SleepCalls(self._reactor, node.inventory, self._sleep),
            services,
            policies,
            sizes,
            volumes,
            settings,
            figures,
        )
        server = control_server(self._reactor, calls)
        path, drain = self._config.control_socket, self._config.times.shutdown

        def stop() -> None:
            shells.stop()
            screens.stop()

        return SocketService(self._reactor, path, CONTROL_MODE, server, drain, stop)

    def _serve_kubectl(self, pods: ControlService, description: DescribeCalls, usage: UsageCalls) -> None:
        """Serve `kubectl infranetes` where the metrics are, if the configuration has an audience for it."""
        audience, server = self._config.metrics.kubectl_audience, self._api_server
        if not audience or server is None or self._metrics is None:
            return
        from infranetes.control.remote import RemotePods  # late: few nodes serve it
        from infranetes.kubernetes.reviews import Reviewer

        reviewer = Reviewer(self._reactor, server.answer, audience)
        remote = RemotePods(reviewer, self._node.inventory, pods, description, usage)
        self._metrics.serve(b"v1", remote.resource())

    def _show_pods(self, pods: ControlService, description: DescribeCalls, policies: PolicyCalls) -> None:
        """Have the node's page lead to pages of its pods."""
        if self._metrics is None:
            return
        from infranetes.control.pod_views import PodViews  # late, as all that is served there

        inventory, attachments = self._node.inventory, self._volumes.attachments
        self._metrics.show_pods(PodViews(inventory, pods, description, policies, attachments))

    def _may_enter(self) -> bool:
        return self._config_in_force.now.running.control.enter

    def _cri_socket(self, streams: StreamingServer) -> SocketService:
        config, node = self._config, self._node
        status = StatusCalls(
            node.inventory,
            node.providers,
            node.handlers,
            config.offered_handlers,
            config.cgroup_driver,
            partial(run_in_thread, self._reactor, lambda: self._config_in_force.now.shown()),
            self._services,
            self._cluster_troubles(),
        )
        runtime = RuntimeService(
            self._reactor,
            status,
            node.listing,
            node.providers,
            node.resizer,
            node.sandboxes,
            node.containers,
            self._checkpoints,
            config.offered_handlers,
            streams.url,
        )
        delegate, cri_images = self._backends.delegate, self._backends.cri_images
        images = image_service(ImageService(cri_images, lambda: self._kept.size + self._sleep.size))
        services = [
            service.intercept(logged(self._reactor, self._observer)).intercept(traced(self._tracer))
            for service in (runtime.service, images)
        ]
        unknown = None
        if delegate is not None and isinstance(cri_images, CatalogueSet):
            inventory, owns = node.inventory, cri_images.owns
            router = make_router(self._reactor, config, delegate, inventory, owns, services, runtime.events)
            services, unknown = router.services(), router.unknown
        server = Server(self._reactor, services, translate_error=errors.to_grpc, unknown=unknown)
        drain = config.times.shutdown
        return SocketService(
            self._reactor, config.socket_path, SOCKET_MODE, server, drain, runtime.events.stop
        )

    def _volume_driver(self) -> CsiService:
        config, reactor = self._config, self._reactor
        if self._publisher is None:
            raise no_volumes(self._backends.providers, self._source)
        publisher, drain = self._publisher, config.times.shutdown
        mounted = MountedVolumes(self._volumes)
        return CsiService(
            reactor, config.csi, config.node, publisher, lambda: self.serves, drain, mounted, self._observer
        )

    @deferred
    async def provider_started(self) -> str:
        """Wait until a provider has started. Returns a line that says what the daemon serves.

        :raise InfranetesError: why it never will."""
        await self._provider_start.started.wait()
        shown = self._pods.shown()
        started = [node_provider.name for node_provider in self._node.providers if not node_provider.trouble]
        return (
            f"infranetes is ready on unix://{self._config.socket_path} (provider "
            f"{', '.join(started)}, {shown} {'sandbox' if shown == 1 else 'sandboxes'})"
        )

    def stopService(self) -> Deferred[None]:
        """Let the calls end for a moment, write down what is known, and leave the VMs running."""
        self._manager.stopping()
        return super().stopService()

    # Reloading the configuration

    def check(self, config: Config) -> None:
        """Check that a daemon could be made of `config`. Blocks: call it in a thread.

        :raise ConfigError: it couldn't."""
        backends = make_backends(self._reactor, config, self._make_provider, self._source)
        check_pools(config, backends.providers, self._source)

    def reconfigure(self, config: Config) -> None:
        """Put in force what can change while the daemon runs: images and pool."""
        if isinstance(self._backends.images, NodeImages):
            self._backends.images.reconfigure(config.images)
        elif (store := container_images(self._backends.images)) is not None:
            store.reconfigure(config.images)
        if self._backends.machines is not None:
            self._backends.machines.reconfigure(config)
        self._node.pools.own.reconfigure(config.pool)

    @property
    def serves(self) -> bool:
        """Whether some pods are served, so that the service manager counts the daemon as ready."""
        return self._backends.delegate is not None or any(
            node_provider.ready.happened for node_provider in self._node.providers
        )


def times(config: Config) -> Times:
    """Return the configured patience as the pods have it."""
    configured = config.times
    return Times(
        launch=configured.launch,
        desertion=configured.desertion,
        listing=configured.listing,
        drain=configured.log_drain,
        sweep=configured.sweep,
        unused=configured.unused_images,
        certificate=configured.certificate,
        watch=WatchTimes(unknown_after=configured.unknown_after),
    )
