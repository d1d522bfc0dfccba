# SPDX-License-Identifier: Apache-2.0
"""The Agent service of ``proto/vmserver.proto``, composed of one object per group of calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from infranetes_common.concurrency import deferred
from infranetes_common.reactors import IReactor
from infranetes_common.service_proxy.kernel import Kernel
from infranetes_common.service_proxy.proxy import ServiceProxy
from infranetes_common.service_proxy.upkeep import Upkeep
from infranetes_common.wire.vmserver_rpcs import agent_service
from vmserver.config import LimitsConfig
from vmserver.containers.provider_choice import ProviderChoice
from vmserver.firewall.firewall import Firewall
from vmserver.identity.current import CurrentIdentity
from vmserver.identity.guard import PortGuard
from vmserver.identity.metadata import MetadataGate
from vmserver.interruptions import FindNotice, Interruptions
from vmserver.keeping.departure import PodDeparture
from vmserver.keeping.holding import Holding
from vmserver.keeping.record import FILE as HELD
from vmserver.keeping.silence import Silence
from vmserver.machine.huge_pages import HugePages
from vmserver.machine.memory import MachineMemory
from vmserver.machine.processors import MachineProcessors
from vmserver.machine.reports import Reports
from vmserver.machine.system_clock import KernelClock
from vmserver.machine.timekeeping import Timekeeping
from vmserver.network.pod_tunnel import PodTunnel
from vmserver.pod_settings import PodSettings
from vmserver.rpc.attestation import AttestationCalls
from vmserver.rpc.clock import ClockCalls
from vmserver.rpc.containers import ContainerCalls
from vmserver.rpc.disks import DiskCalls
from vmserver.rpc.firewall import FirewallCalls
from vmserver.rpc.images import ImageCalls
from vmserver.rpc.keep import KeepCalls
from vmserver.rpc.layers import LayerCalls
from vmserver.rpc.machine import MachineCalls
from vmserver.rpc.memory import MemoryCalls
from vmserver.rpc.nfs import NfsCalls
from vmserver.rpc.pod_network import PodNetworkCalls
from vmserver.rpc.processors import ProcessorCalls
from vmserver.rpc.services import ServiceCalls
from vmserver.rpc.sessions import SessionCalls
from vmserver.rpc.shell import ShellCalls
from vmserver.rpc.stats import StatsCalls
from vmserver.rpc.volumes import VolumeCalls
from vmserver.rpc.watch import WatchCalls
from vmserver.volumes.disks import PodDisks
from vmserver.volumes.guest_disks import GuestDisks
from vmserver.volumes.nfs import NfsMounts
from vmserver.volumes.parts import VolumeParts
from vmserver.volumes.store import VolumeStore

HUGE_PAGES = "huge-pages"  # in run_dir


class AgentService:
    """Every RPC of the agent.

    :param run_dir: for files that a reboot removes.
    :param own_machine: whether the machine belongs to one pod; false where simulated VMs share a machine.
    :param find_notice: checks for the cloud's notice that it will take the machine away; None: no check.
    :param guard: keeps the agent's port for the node; None: not here. :param port: returns that port, if it
        is one of TCP.
    :ivar holding: holds the pod still; None: the machine is shared.
    :ivar service: all the calls as one gRPC service.
    """

    def __init__(
        self,
        reactor: IReactor,
        choice: ProviderChoice,
        settings: PodSettings,
        volumes: VolumeStore,
        parts: VolumeParts,
        identity: CurrentIdentity,
        gate: MetadataGate,
        *,
        limits: LimitsConfig,
        run_dir: Path,
        own_machine: bool = True,
        find_notice: FindNotice | None = None,
        guard: PortGuard | None = None,
        port: Callable[[], int] = lambda: 0,
    ) -> None:
        self._timekeeping = Timekeeping(reactor, KernelClock()) if own_machine else None
        self.machine = MachineCalls(
            reactor, choice, settings, identity, gate, self._timekeeping, own_machine=own_machine
        )
        self.attestation = AttestationCalls(reactor, identity, Reports() if own_machine else None)
        self.clock = ClockCalls(self._timekeeping)
        self.watch = WatchCalls(choice)
        self._interruptions = (
            Interruptions(reactor, find_notice, self.watch.interrupted, lambda: choice.provider)
            if find_notice is not None
            else None
        )
        points = volumes.attached if own_machine else None
        self._nfs = NfsMounts(reactor, points, lambda: identity.sandbox_id) if points is not None else None
        self.nfs = NfsCalls(self._nfs)
        self._huge_pages = (
            HugePages(reactor, lambda: choice.provider.containers(), run_dir / HUGE_PAGES)
            if own_machine
            else None
        )
        self.containers = ContainerCalls(
            reactor, choice, parts, self._nfs, self._huge_pages, execs=limits.execs
        )
        self.sessions = SessionCalls(reactor, choice, sessions=limits.sessions, forwards=limits.forwards)
        self.shells = ShellCalls(reactor)
        self.images = ImageCalls(choice)
        self.layers = LayerCalls(choice)
        self.volumes = VolumeCalls(reactor, volumes)
        self._pod_disks = PodDisks(reactor, points, GuestDisks()) if points is not None else None
        self.disks = DiskCalls(self._pod_disks)
        self.stats = StatsCalls(reactor, choice, own=own_machine)
        kernel = Kernel(reactor)
        proxy = ServiceProxy(kernel)
        self.services = ServiceCalls(proxy if own_machine else None)
        self.pod_network = PodNetworkCalls(PodTunnel(reactor) if own_machine else None)
        firewall = Firewall(reactor)
        self.firewall = FirewallCalls(firewall if own_machine else None)
        self.holding = (
            Holding(
                reactor,
                choice,
                volumes,
                parts,
                Silence(reactor),
                PodDeparture(reactor, firewall, self._nfs),
                run_dir / HELD,
                port,
            )
            if own_machine
            else None
        )
        self.machine.holding = self.holding
        self.keep = KeepCalls(self.holding)
        self._memory = MachineMemory(reactor) if own_machine else None
        self.memory = MemoryCalls(self._memory)
        self.processors = ProcessorCalls(MachineProcessors(reactor) if own_machine else None)
        others = (firewall,) if guard is None else (firewall, guard)
        self._upkeep = Upkeep(reactor, kernel, proxy, *others) if own_machine else None
        self._guard = guard
        self.service = agent_service(
            self.machine,
            self.attestation,
            self.clock,
            self.memory,
            self.processors,
            self.keep,
            self.watch,
            self.containers,
            self.stats,
            self.sessions,
            self.shells,
            self.images,
            self.layers,
            self.services,
            self.pod_network,
            self.firewall,
            self.volumes,
            self.disks,
            self.nfs,
        )
        identity.on_taken = self._begin
        identity.clone = self.holding

    def _begin(self) -> None:
        """Start what only a machine with an identity needs."""
        self.stats.begin_stats()
        if self._interruptions is not None:
            self._interruptions.begin()
        if self._timekeeping is not None:
            self._timekeeping.begin()
        if self._upkeep is not None:
            self._upkeep.begin()
        if self._memory is not None:
            self._memory.begin()
        if self._huge_pages is not None:
            self._huge_pages.begin()

    async def restore(self) -> None:
        """Restore the mounts that containers need after a reboot. Called before the provider is started."""
        if self._pod_disks is not None:
            await self._pod_disks.restore()
        if self._nfs is not None:
            await self._nfs.restore()

    async def restore_hold(self) -> None:
        """Hold a pod on that an earlier agent has held. Called once the provider has started."""
        if self.holding is not None:
            await self.holding.restore()

    async def prepare(self) -> None:
        """Do in a template, once, what each clone would have to do."""
        if self._upkeep is not None:
            await self._upkeep.prepare()

    @deferred
    async def stop(self) -> None:
        """Stop all background work. Idempotent."""
        self.volumes.stop()
        if self._interruptions is not None:
            self._interruptions.stop()
        if self._timekeeping is not None:
            self._timekeeping.stop()
        if self._pod_disks is not None:
            self._pod_disks.stop()
        if self._nfs is not None:
            self._nfs.stop()
        if self._memory is not None:
            self._memory.stop()
        if self._guard is not None:
            self._guard.stop()
        if self._upkeep is not None:
            await self._upkeep.end()

    def limit(self, limits: LimitsConfig) -> None:
        """Change the limits for new calls; calls in progress continue."""
        self.containers.execs.limit = limits.execs
        self.sessions.sessions.limit = limits.sessions
        self.sessions.forwards.limit = limits.forwards
