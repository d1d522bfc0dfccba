# SPDX-License-Identifier: Apache-2.0
"""The pod provider whose VMs are QEMU processes on this node, each a clone of a template.

What has to be known of a VM is in the VM's directory (see `vm.record`), and its process is found by one of
its arguments. So a daemon that follows one which was killed at any instant knows every VM.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.logger import Logger
from zope.interface import implementer

from infranetes.guest import image as images
from infranetes.providers.hypervisor import IBootsImages, IHypervisor
from infranetes.providers.interface import (
    Console,
    IBoundsStarts,
    IBridgesVms,
    ICountsRefusals,
    IFirewallsPods,
    IGivesIdentityPrivately,
    IGuest,
    IHasConsoles,
    IHasGuestImage,
    IJoinsNamespaces,
    Instance,
    InstanceSpec,
    InstanceState,
    IPinsVms,
    IPlacesVms,
    IPodProvider,
    IReachesAgents,
    IResizesVms,
    IShowsDisks,
    Progress,
    ProviderContext,
    ReadOnlyDisk,
    RefusedPackets,
    Share,
    ShownDisk,
    Size,
)
from infranetes.providers.keeping import IStartsKeptVms, KeptVm
from infranetes.providers.qemu import start_checks
from infranetes.providers.qemu.host import uids
from infranetes.providers.qemu.host.kvm import qemu_user
from infranetes.providers.qemu.host.os_errors import as_infranetes_error
from infranetes.providers.qemu.host.uids import UidChoice
from infranetes.providers.qemu.keep.keeper import Keeper
from infranetes.providers.qemu.keep.preparer import Preparer
from infranetes.providers.qemu.keep.state import thd_read
from infranetes.providers.qemu.keep.unchanged import UnchangedHardware
from infranetes.providers.qemu.launch.clone import Origin
from infranetes.providers.qemu.launch.find import find_vms
from infranetes.providers.qemu.launch.image import ImageLaunches
from infranetes.providers.qemu.launch.launcher import Launcher
from infranetes.providers.qemu.launch.parts import make_parts
from infranetes.providers.qemu.maintenance import Maintenance
from infranetes.providers.qemu.network.bridge import BridgePort
from infranetes.providers.qemu.program import process
from infranetes.providers.qemu.program.agent_port import AgentPortEndpoint
from infranetes.providers.qemu.program.command_line import CommandLine
from infranetes.providers.qemu.settings import QemuSettings
from infranetes.providers.qemu.sleep.calls import SleepCalls
from infranetes.providers.qemu.sleep.record import RECORD as SLEEP_RECORD
from infranetes.providers.qemu.sleep.sleeper import Node
from infranetes.providers.qemu.sleep.volumes import VolumesOfSleepers
from infranetes.providers.qemu.status import describe
from infranetes.providers.qemu.template.current import CurrentTemplate
from infranetes.providers.qemu.template.preloaded import PreloadedImages
from infranetes.providers.qemu.template.ram import SharedRam
from infranetes.providers.qemu.template.template import Template
from infranetes.providers.qemu.vm import consoles
from infranetes.providers.qemu.vm.disks import Disks
from infranetes.providers.qemu.vm.hypervisors import Hypervisors
from infranetes.providers.qemu.vm.paths import ProviderPaths
from infranetes.providers.qemu.vm.record import Phase, VmRecord, VmRecords, token_of
from infranetes.providers.qemu.vm.resize import Resizer
from infranetes.providers.qemu.vm.vm import Vm, on_bridge
from infranetes.providers.qemu.volumes.attached import VolumeAttacher
from infranetes.providers.qemu.volumes.volumes import QemuVolumes
from infranetes.providers.sleeping import Activity, ISleeps, Slept
from infranetes.providers.subnet import subnet
from infranetes.providers.volumes import IHasVolumes
from infranetes_common.concurrency import Coro, Flight, KeyedLock, deferred, run_in_thread, settled, within
from infranetes_common.errors import FailedPrecondition, NotFound, Unavailable
from infranetes_common.pod_firewall import PodFirewall
from infranetes_common.reactors import IReactor

_T = TypeVar("_T")
_log = Logger()


@implementer(IPodProvider, IFirewallsPods, IGivesIdentityPrivately, IHasConsoles, IHasGuestImage, IHasVolumes)
@implementer(IBootsImages, IBoundsStarts, IBridgesVms, ICountsRefusals, IJoinsNamespaces)
@implementer(IPinsVms, IPlacesVms, IReachesAgents, IResizesVms, IShowsDisks, ISleeps, IStartsKeptVms)
class QemuProvider:
    """See `IPodProvider`."""

    name = "qemu"

    def __init__(self, reactor: IReactor, settings: QemuSettings, context: ProviderContext) -> None:
        self._reactor = reactor
        self._settings = settings
        self.bridge = settings.bridge
        self._context = context
        self._paths = ProviderPaths(context.state_dir / self.name, context.run_dir / self.name)
        self._records = VmRecords(self._paths.vms)
        self._parts = make_parts(reactor, settings, context, self._paths)
        self._pod_network = self._parts.pod_network
        # By token. Includes VMs of other nodes that share this directory, as they share the addresses, too.
        self._vms: dict[str, Vm] = {}
        self._tokens_in_work: KeyedLock[str] = KeyedLock()
        self._disks = Disks(reactor)
        attacher = VolumeAttacher(reactor, self._find, self._own_vms, self._to_the_end)
        directory = settings.volumes_dir or context.state_dir / self.name / "volumes"
        self.volumes = QemuVolumes(
            reactor, directory, context.node, attacher, settings.devices, settings.qemu_img
        )
        self._resizer = Resizer(reactor, settings)
        hardware = UnchangedHardware(self._disks, self._resizer, attacher.volumes, self.volumes.list)
        self._keeper = Keeper(reactor, settings.qemu_img, hardware.of, self._parts.placement.room)
        self._uids = UidChoice(reactor, uids.parse(settings.uids), self._uids_of_vms)
        self._preparer = Preparer(reactor, settings, self._paths.run, self._uids)
        self._preloaded = PreloadedImages(context, self._disks.show_first)
        self._current = CurrentTemplate(reactor, settings, self._paths, self._preloaded)
        self._under_way: list[Flight[Any]] = []  # Any: launches and destructions have different results
        self._watchers: list[Callable[[Instance], None]] = []
        self._ram = SharedRam(reactor)
        self._sleeps = self._make_sleeps(attacher)
        self._hypervisors = Hypervisors(
            reactor,
            self._records,
            self._parts.placement.why_ended,
            self._parts.uplink.guest_network,
            self._parts.uplink.has_address,
            settings.console_size,
        )
        self._maintenance = Maintenance(
            reactor, self._pod_network, self._vms, settings.console_size, self._keeper.tidy
        )
        self._directory_lock = -1
        self._launcher: Launcher | None = None

    # ---- IPodProvider

    @deferred
    async def start(self, progress: Progress) -> None:
        start_checks.check_rights()
        user = qemu_user(self._settings.user)
        try:
            images.current(self._settings.image_dir)
        except images.NoGuestImage as error:
            # This is so after every new installation, until infranetes-guest.service or a person has built
            # the image.
            raise start_checks.without_image(self._settings.image_dir, error) from None
        templates = self._paths.templates(self._settings.template_dir)
        start_checks.make_directories(self._paths, templates)
        self._directory_lock = await start_checks.take_lock(self._reactor, self._paths)
        try:
            records, parts = self._records, self._parts
            await self._preparer.end_leftovers()
            ended = self._process_ended
            slept = self._sleeps.sleeper.find
            vms = await find_vms(self._reactor, records, self._paths, user, parts.placement, ended, slept)
            self._vms.update(vms)
            Flight(self._sleeps.sleeper.go_on(self._own_vms()))
            Flight(
                self._keeper.resume(vm for vm in self._own_vms() if vm.alive)
            )  # before all that takes long
            template = await self._current.start(user, progress)
            async with self._pod_network.lock:
                ports = [vm for vm in on_bridge(self._vms.values()) if not vm.launching]
                await self._pod_network.set_up({vm.record.bridge_port: vm.paths.directory for vm in ports})
            ended = self._report_end
            image_launches = ImageLaunches(self._reactor, self._settings, records, parts, self._line())
            launcher = Launcher(
                self._reactor,
                self._settings,
                records,
                parts,
                user,
                self._paths,
                ended,
                self._preloaded.show,
                image_launches,
                self._hypervisors,
                self._disks,
                self._uids,
                self._ram,
            )
            await launcher.prepare(template)
            await self._sleeps.sleeper.resume(self._own_vms())
            self._launcher = launcher
        except BaseException:
            await self.stop()
            raise
        self._maintenance.begin()
        await parts.uplink.resume([vm for vm in self._vms.values() if vm.alive])
        self._hypervisors.begin(self._own_vms())
        Flight(self.volumes.snapshots.sweep())  # in the background, as a VM that does not answer may delay it
        self._pod_network.watch_firewalls()

    @deferred
    async def stop(self) -> None:
        self._maintenance.end()
        await self._keeper.stop()
        await self._pod_network.stop()
        await self.volumes.stop()
        launcher, self._launcher = self._launcher, None
        self._sleeps.stop()
        await settled([flight.join() for flight in self._under_way])
        await self._preparer.stop()
        if launcher is not None:
            await launcher.close()
        await self._parts.uplink.close()
        await self._hypervisors.close()
        vms = list(self._vms.values())
        await settled(vm.release(self._reactor) for vm in vms)
        for vm in vms:
            vm.detach()
            vm.changes.notify()
        self._vms.clear()
        if self._directory_lock >= 0:
            os.close(self._directory_lock)
            self._directory_lock = -1

    @deferred
    async def configure_network(self, pod_cidr: str) -> None:
        network = subnet(pod_cidr)
        async with self._pod_network.lock:
            if network != await self._pod_network.subnet():
                in_use = [IPv4Address(record.address) for record in await self._records_in_use()]
                ports = self._ports_in_use() if self._directory_lock >= 0 else None
                await self._pod_network.change(network, in_use, ports)

    def launch(self, spec: InstanceSpec) -> Deferred[Instance]:
        return self._to_the_end(self._launch(spec))

    @deferred
    async def wait_running(self, instance_id: str, timeout: float) -> Instance:
        return await within(
            self._reactor, timeout, self._wait_running(instance_id), f"the start of VM {instance_id}"
        )

    @deferred
    async def get(self, instance_id: str) -> Instance:
        return self._find(instance_id).instance()

    @deferred
    async def list(self) -> list[Instance]:
        return [vm.instance() for vm in self._own_vms()]

    def destroy(self, instance_id: str) -> Deferred[None]:
        return self._to_the_end(self._destroy(instance_id))

    def watch(self, ended: Callable[[Instance], None]) -> None:
        self._watchers.append(ended)

    def container_providers(self) -> Sequence[str]:
        template = self._current.template
        return template.image.providers if template else ()

    def status(self) -> Mapping[str, str]:
        states = [vm.state for vm in self._own_vms()]
        network, current = str(self._pod_network), self._current
        return describe(self._settings, current.line, current.reason, current.template, network, states)

    # ---- IReachesAgents

    def agent_endpoint(self, instance_id: str) -> IStreamClientEndpoint | None:
        token = token_of(instance_id)
        path = self._paths.agent_port(token) if token else None  # also before `start`
        return AgentPortEndpoint(self._reactor, path) if path is not None and path.exists() else None

    # ---- IHasConsoles

    @deferred
    async def consoles(self, sandbox: str) -> Sequence[Console]:
        # Also while the provider can't start: its records and the archive are on disk, and needed then.
        records = [vm.record for vm in self._vms.values()] if self._launcher else await self._saved_records()
        running = [
            record for record in records if self._owns(record) and record.sandbox_id.startswith(sandbox)
        ]
        running.sort(key=lambda record: record.created_at, reverse=True)
        size = self._settings.console_size
        screens = [
            await run_in_thread(
                self._reactor, consoles.read, record, self._records.directory_of(record.token), size
            )
            for record in running
        ]
        return [*screens, *await run_in_thread(self._reactor, self._parts.consoles.find, sandbox)]

    # ---- IShowsDisks

    @deferred
    async def show_disks(self, instance_id: str, disks: Sequence[ReadOnlyDisk]) -> Sequence[ShownDisk]:
        return await self._to_the_end(self._disks.show(self._find(instance_id), disks))

    @deferred
    async def shown_disks(self, instance_id: str) -> Sequence[ShownDisk]:
        return await self._to_the_end(self._disks.shown(self._find(instance_id)))

    @deferred
    async def hide_disks(self, instance_id: str, names: Sequence[str]) -> None:
        await self._to_the_end(self._disks.hide(self._find(instance_id), names))

    # ---- IStartsKeptVms

    @deferred
    async def keep(self, instance_id: str, directory: Path, seconds: float) -> KeptVm:
        self._started()
        return await self._keeper.keep(self._find(instance_id), directory, seconds)

    @deferred
    async def prepare(self, directory: Path, seconds: float) -> None:
        await self._preparer.prepare(directory, await self._ready_template(), seconds)

    @deferred
    async def check(self, directory: Path) -> None:
        await run_in_thread(self._reactor, thd_read, directory, await self._ready_template())

    # ---- ISleeps

    def sleep(self, instance_id: str) -> Deferred[Slept]:
        return self._to_the_end(self._sleeps.sleep(instance_id))

    def wake(self, instance_id: str) -> Deferred[None]:
        return self._to_the_end(self._sleeps.wake(instance_id))

    @deferred
    async def activity(self, instance_id: str) -> Activity:
        return await self._sleeps.activity(instance_id)

    def when_called(self, called: Callable[[str], None]) -> None:
        self._sleeps.when_called(called)

    def slept_bytes(self) -> int:
        return self._sleeps.sleeper.size

    def _make_sleeps(self, attacher: VolumeAttacher) -> SleepCalls:
        volumes, reactor = self.volumes, self._reactor
        of_sleepers = VolumesOfSleepers(
            reactor, self._disks, self._resizer, attacher.volumes, volumes.list, volumes.thd_path
        )
        node = Node(
            self._parts.uplink,
            self._parts.placement,
            self._disks,
            self._ram,
            self._intact_template,
            self._line,
            self._keeper.none_of,
            of_sleepers.unchanged,
            of_sleepers,
            self._could_not_wake,
            self._process_ended,
        )
        seconds = self._settings.launch_timeout
        return SleepCalls(reactor, node, self._find_to_change, self._tokens_in_work, seconds)

    async def _could_not_wake(self, vm: Vm) -> None:
        if self._launcher is not None:
            await self._launcher.report_end(vm)
        else:  # before it has started, whoever asks is told
            await run_in_thread(self._reactor, self._records.update, vm.record)

    # ---- IFirewallsPods

    @deferred
    async def set_firewall(self, instance_id: str, firewall: PodFirewall) -> None:
        uplink = self._parts.uplink
        await self._to_the_end(self._change(instance_id, lambda vm: uplink.set_firewall(vm, firewall)))

    # ---- ICountsRefusals

    def refusals(self, instance_id: str) -> Mapping[Share, RefusedPackets]:
        vm = self._find(instance_id)
        return self._maintenance.refused.get(vm.record.bridge_port.address, {}) if on_bridge([vm]) else {}

    # ---- IBootsImages

    def hypervisor(self, instance_id: str) -> IHypervisor:
        """See `IBootsImages`."""
        vm = self._find(instance_id)
        if vm.record.guest is None:
            raise NotFound(f"VM {instance_id} was not booted from an image")
        return self._hypervisors.of(vm)

    # ---- IBoundsStarts, IResizesVms, IPlacesVms, IPinsVms

    def starts_at_once(self) -> int:
        line = self._current.line
        return self._settings.starts_at_once if line is not None and line.accelerator == "tcg" else 0

    @deferred
    async def resize(self, instance_id: str, size: Size, guest: IGuest | None = None) -> Size:
        self._started()
        vm = self._find(instance_id)
        if vm.record.guest is not None:
            raise FailedPrecondition("a VM that boots an image keeps the size with which it was made")
        return await self._to_the_end(self._resizer.resize(vm, size, self._line(), guest))

    @deferred
    async def place(self, instance_id: str, cgroup_parent: str, size: Size) -> None:
        place = self._started().place
        await self._to_the_end(self._change(instance_id, lambda vm: place(vm, cgroup_parent, size)))

    @deferred
    async def pin(self, instance_id: str, cpus: str, mems: str) -> None:
        pin = self._started().pin
        await self._to_the_end(self._change(instance_id, lambda vm: pin(vm, cpus, mems)))

    async def _change(self, instance_id: str, change: Callable[[Vm], Awaitable[_T]]) -> _T:
        async with self._tokens_in_work.held(self._find(instance_id).record.token):
            # Found anew, as it may have been destroyed meanwhile.
            return await change(self._find(instance_id))

    # ---- Starting

    async def _saved_records(self) -> Sequence[VmRecord]:
        return await run_in_thread(self._reactor, self._records.read)

    async def _records_in_use(self) -> Sequence[VmRecord]:
        """Return the records of VMs on the bridge that run or are being made, also before `start`."""
        if self._directory_lock >= 0:
            return [vm.record for vm in on_bridge(self._vms.values())]
        saved = [record for record in await self._saved_records() if record.on_bridge]
        names = [record.process_name for record in saved]
        processes = await run_in_thread(self._reactor, process.pids_by_argument, names)
        return [record for record in saved if record.process_name in processes or self._is_asleep(record)]

    def _is_asleep(self, saved: VmRecord) -> bool:
        return (self._records.directory_of(saved.token) / SLEEP_RECORD).exists()

    def _ports_in_use(self) -> Sequence[BridgePort]:
        return [vm.record.bridge_port for vm in on_bridge(self._vms.values())]

    # ---- Launching, waiting, destroying

    async def _launch(self, spec: InstanceSpec) -> Instance:
        async with self._tokens_in_work.held(spec.token):
            launcher = self._started()
            earlier = self._vms.get(spec.token)
            if earlier is not None:
                if earlier.launching or earlier.record.phase is not Phase.STARTING:
                    return earlier.instance()
                await launcher.tear_down(earlier)  # an earlier daemon was killed while it made this VM
                self._vms.pop(spec.token, None)
            origin: Origin | None = await self._template_for(spec)
            await launcher.validate(spec, origin)
            async with self._pod_network.lock:
                network = await self._pod_network.subnet()
                vm = await launcher.reserve(spec, network, self._vms)
            try:
                if spec.kept is not None and origin is not None:
                    # Not before the VM is listed: reading it takes a while.
                    origin = await run_in_thread(self._reactor, thd_read, spec.kept, origin.template)
                    await launcher.validate(spec, origin)
                async with self._giving_root(spec):
                    await launcher.launch(vm, spec, origin)
            except Exception as error:
                vm.launching = False
                if not vm.paths.directory.exists():
                    self._vms.pop(spec.token, None)  # otherwise it could not be torn down, and stays listed
                vm.changes.notify()
                raise as_infranetes_error(error) from error
            return vm.instance()

    async def _template_for(self, spec: InstanceSpec) -> Template | None:
        """Return the template of which a VM is a clone; None: it boots an image."""
        if spec.request.boot is not None:
            if spec.kept is not None:
                raise FailedPrecondition("a VM that boots an image can't start from a kept state")
            return None
        return await self._ready_template()

    async def _ready_template(self) -> Template:
        self._started()
        return await self._intact_template()

    async def _intact_template(self) -> Template:
        return await self._current.intact(lambda message: _log.info("{message}", message=message))

    def _line(self) -> CommandLine:
        assert self._current.line is not None
        return self._current.line

    def _giving_root(self, spec: InstanceSpec) -> AbstractAsyncContextManager[None]:
        boot = spec.request.boot
        root = boot.root.volume if boot is not None and boot.root is not None else ""
        return self.volumes.being_given(root) if root else nullcontext()

    async def _wait_running(self, instance_id: str) -> Instance:
        while True:
            vm = self._find(instance_id)
            state = vm.state
            if state is InstanceState.RUNNING:
                return vm.instance()
            if state is InstanceState.ENDED:
                raise vm.ended_error()
            if not vm.launching:
                raise Unavailable(
                    f"VM {instance_id} was being made by a daemon that was killed; launch it again"
                )
            await vm.changes.wait()

    async def _destroy(self, instance_id: str) -> None:
        token = token_of(instance_id)
        if token is None:
            return
        self._sleeps.cancel(token)
        async with self._tokens_in_work.held(token):
            vm = self._vms.get(token)
            if vm is None or not self._owns(vm.record):
                return
            launcher = self._started()
            vm.destroying = True
            try:
                await self._sleeps.sleeper.forget(vm)
                await launcher.tear_down(vm)
            except Exception as error:
                vm.destroying = False
                raise as_infranetes_error(error) from error
            self._vms.pop(token, None)
            vm.changes.notify()

    def _process_ended(self, vm: Vm) -> None:
        """Handle the end of a process that was found at the start."""
        if self._launcher is not None:
            self._launcher.process_ended(vm)

    def _report_end(self, vm: Vm) -> None:
        if not self._owns(vm.record):
            return
        for watcher in (*self._watchers,):
            try:
                watcher(vm.instance())
            except Exception:
                _log.failure("a watcher of VMs' ends failed over {vm}", vm=vm.record.id)

    def _to_the_end(self, work: Coro[_T]) -> Deferred[_T]:
        """Start work that goes on when its caller is cancelled, so that no VM is left half made or gone."""
        flight = Flight(work)
        self._under_way = [*(running for running in self._under_way if not running.done), flight]
        return flight.join()

    # ---- Which VMs

    def _started(self) -> Launcher:
        if self._launcher is None:
            raise Unavailable("the QEMU provider is not started, or is stopping")
        return self._launcher

    def _find(self, instance_id: str) -> Vm:
        vm = self._vms.get(token_of(instance_id) or "")
        if vm is None or not self._owns(vm.record):
            raise NotFound(f"there is no VM {instance_id[:80]!r}")
        return vm

    def _find_to_change(self, instance_id: str) -> Vm:
        self._started()
        return self._find(instance_id)

    def _uids_of_vms(self) -> set[int]:
        return {vm.record.uid for vm in self._vms.values()}

    def _own_vms(self) -> Sequence[Vm]:
        return [vm for vm in self._vms.values() if self._owns(vm.record)]

    def _owns(self, record: VmRecord) -> bool:
        """Return whether the VM is this node's, or has a record that can't be read."""
        owner = (record.cluster, record.node)
        return owner in ((self._context.cluster, self._context.node), ("", ""))
