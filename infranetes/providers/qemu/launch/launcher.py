# SPDX-License-Identifier: Apache-2.0
"""Makes VMs, by the steps of `clone` and then the identity and the size; and tears them down."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Awaitable, Callable
from functools import partial
from ipaddress import IPv4Address, IPv4Network

import attrs
from twisted.internet.defer import CancelledError
from twisted.logger import Logger

from infranetes.providers import subnet
from infranetes.providers.annotations import read, refuse_unknown
from infranetes.providers.interface import InstanceSpec, Size
from infranetes.providers.machine_images import ImageBoot
from infranetes.providers.qemu.cgroups.placement import PodRoom
from infranetes.providers.qemu.host import uids
from infranetes.providers.qemu.host.os_errors import as_infranetes_error
from infranetes.providers.qemu.host.privileges import QemuUser
from infranetes.providers.qemu.host.uids import UidChoice
from infranetes.providers.qemu.keep.hardware import add_plugged
from infranetes.providers.qemu.keep.state import KeptState
from infranetes.providers.qemu.launch import clone
from infranetes.providers.qemu.launch.clone import Origin, StepTimer
from infranetes.providers.qemu.launch.image import ImageLaunches
from infranetes.providers.qemu.launch.parts import Parts
from infranetes.providers.qemu.program.memory import Memory
from infranetes.providers.qemu.settings import QemuSettings
from infranetes.providers.qemu.template.ram import SharedRam
from infranetes.providers.qemu.template.template import Template
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes.providers.qemu.vm.disks import Disks
from infranetes.providers.qemu.vm.hypervisors import Hypervisors
from infranetes.providers.qemu.vm.paths import ProviderPaths
from infranetes.providers.qemu.vm.record import Guest, Phase, VmRecord, VmRecords
from infranetes.providers.qemu.vm.sizes import disk_size, lacking, machine_overhead, needed_overhead
from infranetes.providers.qemu.vm.vm import Vm
from infranetes_common.concurrency import run_in_thread, start, within
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument, Unavailable
from infranetes_common.identity import AGENT_PORT, encode, encode_clock
from infranetes_common.reactors import IReactor

_CLOCK_SECONDS = 10.0
_SERVED = ("disk", "set_hostname")  # the annotations, as fields of `Wishes`, that this provider serves
_TOKEN = re.compile(r"[0-9a-f]{32}")
_log = Logger()


class Launcher:
    """Makes and ends this daemon's VMs.

    :param user: the template's.
    :param ended: called with each VM that ended although nobody had asked for that.
    :ivar consoles: those of the VMs destroyed last.
    """

    def __init__(
        self,
        reactor: IReactor,
        settings: QemuSettings,
        records: VmRecords,
        parts: Parts,
        user: QemuUser,
        paths: ProviderPaths,
        ended: Callable[[Vm], None],
        loaded: Callable[[Vm], Awaitable[None]],
        images: ImageLaunches,
        hypervisors: Hypervisors,
        disks: Disks,
        uid_choice: UidChoice,
        ram: SharedRam,
    ) -> None:
        self._reactor = reactor
        self._settings = settings
        self._records = records
        self._uplink = parts.uplink
        self._placement = parts.placement
        self._user = user
        self._paths = paths
        self._ended = ended
        self._loaded = loaded
        self._disks = disks
        self._images = images
        self._hypervisors = hypervisors
        self._uids = uid_choice
        self._last_address: IPv4Address | None = None
        self._ram = ram
        self._template_ram: Memory | None = None  # had for the next VM, too
        self._room = PodRoom(0)
        self._machine_room = PodRoom(0)
        self._consoles = parts.consoles

    async def validate(self, spec: InstanceSpec, origin: Origin | None) -> None:
        """Check that this VM can be made. :param origin: None: it boots an image.

        :raise InvalidArgument: it can't. :raise FailedPrecondition: the node lacks something.
        """
        if not _TOKEN.fullmatch(spec.token):
            raise InvalidArgument("the token of a VM has to be 32 of 0-9 and a-f")
        refuse_unknown("qemu", spec.request.annotations)
        wishes = read(spec.request.annotations)
        wishes.refuse_others("qemu", _SERVED)
        if spec.request.boot is not None:
            await self._images.validate(spec, spec.request.boot)
            return
        assert origin is not None
        line = origin.template.command_line
        disk_size(line, wishes.disk, self._settings.max_disk)
        lacking(line, origin.more, spec.request.size, self._settings)

    async def prepare(self, template: Template) -> None:
        """Load the template's memory, for which the first launch would wait, and try what connects VMs.

        :raise OSError: no memory. :raise FailedPrecondition: VMs can't be connected.
        """
        await self._uplink.prepare()
        self._template_ram = await self._ram.of(template.ram)
        self._room = PodRoom(needed_overhead(template.command_line, self._settings))
        self._machine_room = PodRoom(machine_overhead(template.command_line, self._settings))

    async def close(self) -> None:
        """Release the memory that launches share. VMs go on."""

        def release() -> None:  # in a thread: freeing that much memory takes a while
            self._template_ram = None

        await run_in_thread(self._reactor, release)

    async def reserve(self, spec: InstanceSpec, network: IPv4Network, vms: dict[str, Vm]) -> Vm:
        """Choose a user and an address for a new VM and add it to `vms`, so that it is listed. Makes nothing.

        The caller lets only one reservation run at a time.

        :raise ResourceExhausted: all users or all addresses are taken.
        """
        request = spec.request
        address = ""  # in a namespace, it is read from the link there, before anything is made
        if request.attachment is None:
            taken = {IPv4Address(vm.record.address) for vm in vms.values() if vm.record.on_bridge}
            self._last_address = subnet.free_address(network, taken, self._last_address)
            address = str(self._last_address)
        room = self._room if request.boot is None else self._machine_room
        record = VmRecord(
            spec.token,
            spec.sandbox_id,
            spec.cluster,
            spec.node,
            address,
            time.time(),
            attachment=request.attachment,
            cgroup_parent=room.group_of(spec.sandbox_id, request.cgroup_parent, request.size),
            guest=Guest() if request.boot is not None else None,
            root=_root_volume(request.boot),
        )
        vm = Vm(record, self._paths.of_vm(record, self._user))
        vm.launching = True
        vms[spec.token] = vm
        try:
            uid = await self._uids.lend()
        except BaseException:
            del vms[spec.token]
            raise
        vm.record = attrs.evolve(record, uid=uid)
        self._uids.give_back(uid)  # it is the VM's
        vm.paths = self._paths.of_vm(vm.record, self._user)
        return vm

    async def launch(self, vm: Vm, spec: InstanceSpec, origin: Origin | None) -> None:
        """Make a reserved VM: it executes when this returns, and `vm.handover` goes on to make it READY. One
        that boots an image is READY when this returns, and executes nothing.

        :raise InfranetesError, OSError: a step failed; nothing of the VM is left.
        """
        steps = StepTimer(self._reactor)
        try:
            if spec.request.boot is not None:
                await self._prepare(vm, spec, spec.request.boot, steps)
                return
            assert origin is not None
            await self._execute(vm, origin, steps)
        except Exception as error:
            output = vm.paths.last_output()
            _log.error(
                "sandbox {sandbox}: VM {vm} can't be made: {error} (done: {steps})",
                sandbox=spec.sandbox_id,
                vm=vm.record.id,
                error=str(error),
                steps=str(steps),
            )
            await self._tear_down_or_keep(vm)
            translated = as_infranetes_error(error)
            raise type(translated)(
                f"{translated}; QEMU's last output: {output}" if output else str(translated)
            ) from error
        vm.handover = start(self._hand_over(vm, spec, origin, steps))
        vm.handover.addErrback(lambda failure: _log.failure("the handover to a VM failed", failure))

    async def _prepare(self, vm: Vm, spec: InstanceSpec, boot: ImageBoot, steps: StepTimer) -> None:
        self._hypervisors.of(vm)  # hears of the guest from its beginning
        await self._images.prepare(vm, spec, boot, lambda: self.process_ended(vm), steps)
        hypervisor = self._hypervisors.of(vm)
        hypervisor.follow()
        if boot.base.has_agent:
            await hypervisor.execute()
            steps.done("execute")
        vm.launching = False
        vm.changes.notify()
        _log.info(
            "sandbox {sandbox}: VM {vm} is prepared at {address} after {seconds:.3f} s ({steps})",
            sandbox=spec.sandbox_id,
            vm=vm.record.id,
            address=vm.record.address,
            seconds=steps.seconds,
            steps=str(steps),
        )
        if vm.process is not None and vm.process.gone:
            self.process_ended(vm)

    async def _execute(self, vm: Vm, origin: Origin, steps: StepTimer) -> None:
        template = origin.template
        address, *more = await self._uplink.addresses(vm)
        vm.record = attrs.evolve(
            vm.record,
            address=address,
            more_addresses=tuple(more),
            template=template.directory.name,
            template_made_at=await run_in_thread(self._reactor, template.made_at),
            image=template.image.key,
            kept=str(origin.directory) if isinstance(origin, KeptState) else "",
        )
        await run_in_thread(self._reactor, self._records.add, vm.record, origin.overlay)
        vm.ram = await self._ram.of(origin.ram)
        if origin is template:
            self._template_ram = vm.ram
        steps.done("files")
        vm.process = await clone.start_process(
            self._reactor, origin, vm.ram, vm.record, vm.paths, lambda: self.process_ended(vm)
        )
        await self._placement.place(vm.record, vm.process.pid)
        steps.done("process")
        vm.connections = VmConnections(self._reactor)
        await vm.connections.open(vm.paths.sockets)
        if isinstance(origin, KeptState):
            await add_plugged(vm.connections.qmp, origin.hardware, template.command_line)
            await self._disks.show_as_kept(vm, origin.disks)
            steps.done("disks")
        joining = start(self._uplink.join(vm))
        loaded = partial(self._template_loaded, vm, origin)
        await clone.execute(vm.connections, joining, loaded, self._settings.launch_timeout, steps)

    async def _template_loaded(self, vm: Vm, origin: Origin) -> None:
        if origin is origin.template:  # a kept VM has its disks, and may lack those that others begin with
            await self._loaded(vm)

    async def _hand_over(self, vm: Vm, spec: InstanceSpec, origin: Origin, steps: StepTimer) -> None:
        try:
            agent_port = await self._hand_over_identity(vm, spec)
            steps.done("identity")
            await self._resize(vm, spec, origin)
            steps.done("size")
            if agent_port:  # it is called by TLS: its image is of an earlier release
                vm.paths.agent_port.unlink(missing_ok=True)
            vm.record = attrs.evolve(vm.record, agent_port=agent_port or AGENT_PORT)
            if vm.record.agent_port != AGENT_PORT:
                await self._uplink.join(vm)  # whose rules then keep this port for the node
            vm.record = attrs.evolve(vm.record, phase=Phase.READY)
            await run_in_thread(self._reactor, self._records.update, vm.record)
            _log.info(
                "sandbox {sandbox}: VM {vm} runs at {address} after {seconds:.3f} s ({steps})",
                sandbox=spec.sandbox_id,
                vm=vm.record.id,
                address=vm.record.address,
                seconds=steps.seconds,
                steps=str(steps),
            )
        except CancelledError:
            pass  # the daemon stops, or the VM is destroyed
        except Exception as error:
            if not vm.destroying:
                await self._fail(vm, as_infranetes_error(error))
        finally:
            vm.launching = False
            vm.changes.notify()
        if vm.record.phase is Phase.READY and vm.process is not None and vm.process.gone:
            self.process_ended(vm)

    async def _hand_over_identity(self, vm: Vm, spec: InstanceSpec) -> int:
        """Give the agent its identity. Returns the TCP port that it listens on; 0: its own port."""
        assert vm.connections is not None
        port = vm.connections.identity_port
        guest_network = await self._uplink.guest_network(vm)
        hostname = spec.identity.hostname if read(spec.request.annotations).set_hostname else ""
        identity = attrs.evolve(
            spec.identity, hostname=hostname, now_nanos=time.time_ns(), network=guest_network
        )
        seconds = self._settings.boot_timeout
        if vm.record.kept:  # its agent has one, until it notices that this is another connection
            await within(self._reactor, seconds, port.waiting.wait(), "its agent's asking for its identity")
        port.send(encode(identity))
        agent_port = await within(self._reactor, seconds, port.ready.wait(), "its agent's start")
        # The identity took long to reach a guest that had just woken up; this line does not.
        port.send(encode_clock(time.time_ns()))
        port.clock_set.wait().addTimeout(_CLOCK_SECONDS, self._reactor).addBoth(lambda _: port.close())
        return agent_port

    async def _resize(self, vm: Vm, spec: InstanceSpec, origin: Origin) -> None:
        """Give the VM the memory, processors and disk that the pod asks for."""
        settings, command_line = self._settings, origin.template.command_line
        assert vm.connections is not None
        more = lacking(command_line, origin.more, spec.request.size, settings)
        await vm.connections.hotplug(command_line, more, settings.boot_timeout)
        disk = disk_size(command_line, read(spec.request.annotations).disk, settings.max_disk)
        if disk > origin.disk:
            await vm.connections.enlarge_disk(disk)

    async def place(self, vm: Vm, cgroup_parent: str, size: Size) -> None:
        """Put a VM that was launched without one into a pod's control group. See `IPlacesVms`."""
        cgroup_parent = self._room.group_of(vm.record.sandbox_id, cgroup_parent, size)
        if not cgroup_parent:
            return
        if vm.record.cgroup_parent not in ("", cgroup_parent):
            raise FailedPrecondition(f"VM {vm.record.id} is another pod's: in {vm.record.cgroup_parent}")
        if vm.process is None or not vm.alive:
            raise Unavailable(f"VM {vm.record.id} does not run: {vm.instance().detail}")
        vm.record = attrs.evolve(vm.record, cgroup_parent=cgroup_parent)
        await run_in_thread(self._reactor, self._records.update, vm.record)
        await self._placement.place(vm.record, vm.process.pid)

    async def pin(self, vm: Vm, cpus: str, mems: str) -> None:
        """See `IPinsVms`."""
        if vm.process is None or not vm.alive:
            raise Unavailable(f"VM {vm.record.id} does not run: {vm.instance().detail}")
        await self._placement.pin(vm.record, vm.process.pid, cpus, mems)

    async def _fail(self, vm: Vm, error: InfranetesError) -> None:
        """End a VM that executes and does not become READY."""
        try:
            await vm.end_process(self._reactor)
            shut_down = vm.connections is not None and vm.connections.shutdown_reason
            detail = f"{error}; {vm.explain_end()}" if shut_down else str(error)
        except InfranetesError as stuck:
            detail = f"{error}; {stuck}"
        vm.record = attrs.evolve(vm.record, phase=Phase.FAILED, detail=detail)
        _log.error(
            "sandbox {sandbox}: VM {vm} failed to start: {detail}",
            sandbox=vm.record.sandbox_id,
            vm=vm.record.id,
            detail=detail,
        )
        await self._save(vm)
        self._ended(vm)

    def process_ended(self, vm: Vm) -> None:
        """Handle the end of a VM's process; called once for each VM."""
        if vm.destroying or vm.launching or vm.asleep:
            return  # the launch, the teardown or the waking under way notices by itself
        if vm.record.guest is not None and vm.record.phase is Phase.READY:
            self._hypervisors.of(vm).process_ended()  # what has ended is the guest; the VM is there
            return
        if not vm.record.detail:
            detail = self._placement.why_ended(vm.record) or vm.explain_end()
            vm.record = attrs.evolve(vm.record, detail=detail)
        start(self.report_end(vm))

    async def report_end(self, vm: Vm) -> None:
        """Report a VM that has ended, as its record says, and has no process."""
        _log.warn(
            "sandbox {sandbox}: VM {vm} has ended: {detail}",
            sandbox=vm.record.sandbox_id,
            vm=vm.record.id,
            detail=vm.record.detail,
        )
        vm.changes.notify()
        await self._save(vm)
        self._ended(vm)

    async def _save(self, vm: Vm) -> None:
        try:
            await run_in_thread(self._reactor, self._records.update, vm.record)
        except OSError as error:
            _log.warn("the record of VM {vm} can't be saved: {error}", vm=vm.record.id, error=str(error))

    async def tear_down(self, vm: Vm) -> None:
        """End a VM and remove all that belongs to it, however much of it there is. Idempotent.

        :raise Unavailable: its process can't be ended; the rest is left as it is.
        """
        await vm.end_process(self._reactor)
        if vm.record.uid:
            await run_in_thread(self._reactor, uids.kill_processes, vm.record.uid)
        await vm.release(self._reactor)
        vm.detach()
        if vm.record.guest is not None:
            self._hypervisors.forget(vm)
        await self._placement.forget(vm.record)
        await self._uplink.leave(vm)
        await run_in_thread(self._reactor, self._remove_files, vm)

    async def _tear_down_or_keep(self, vm: Vm) -> None:
        """Tear a VM down; if that fails, it stays listed and `destroy` tries again."""
        try:
            await self.tear_down(vm)
        except Exception as error:
            detail = f"it could not be made, nor torn down: {error}"
            _log.error("VM {vm}: {detail}", vm=vm.record.id, detail=detail)
            vm.record = attrs.evolve(vm.record, phase=Phase.FAILED, detail=detail)
            await self._save(vm)

    def _remove_files(self, vm: Vm) -> None:
        shutil.rmtree(vm.paths.sockets, ignore_errors=True)
        if vm.paths.directory.exists():
            try:
                self._consoles.add(vm.record, vm.paths.directory)
            except OSError as error:
                _log.warn("the console of VM {vm} can't be kept: {error}", vm=vm.record.id, error=str(error))
            shutil.rmtree(self._records.hide(vm.record.token), ignore_errors=True)


def _root_volume(boot: ImageBoot | None) -> str:
    return boot.root.volume if boot is not None and boot.root is not None else ""
