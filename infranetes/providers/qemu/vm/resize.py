# SPDX-License-Identifier: Apache-2.0
"""Memory and processors plugged into VMs that run, and taken out of them.

What a VM has is asked of its QEMU each time. Processors of an emulated VM are never taken out: QEMU ends
(7.2, `tcg_register_thread`) when it has made more of them in its life than a VM can have at a time. The guest
lets them rest.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager

import attrs
from twisted.logger import Logger

from infranetes.providers.interface import IGuest, Size
from infranetes.providers.qemu.program.command_line import CommandLine
from infranetes.providers.qemu.program.qmp import QmpError
from infranetes.providers.qemu.settings import MIB, QemuSettings
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes.providers.qemu.vm.memory import Piece, PluggedMemory, read_piece
from infranetes.providers.qemu.vm.sizes import Hotplug, hotplug_for, memory_for_pod
from infranetes.providers.qemu.vm.vm import Vm
from infranetes_common.concurrency import KeyedLock, backoff, sleep, start, to_its_end, within
from infranetes_common.errors import FailedPrecondition, InfranetesError, Unavailable
from infranetes_common.reactors import IReactor

_CORE = "core-id"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds
_log = Logger()


@attrs.frozen
class _Cpu:
    """A processor, or the place of one."""

    driver: str
    properties: Mapping[str, int]  # its place
    path: str  # the path of the object in QEMU; "": there is none

    @property
    def plugged(self) -> bool:
        return bool(self.path)

    @property
    def core(self) -> int:
        return self.properties[_CORE]

    @property
    def device(self) -> str:
        """The name that the device got when it was plugged in."""
        return self.path.rpartition("/")[2]


@attrs.frozen
class _Hardware:
    """The hardware that a VM has, by QEMU's answers."""

    cpus: Sequence[_Cpu]  # by core
    base_mib: int
    pieces: Sequence[Piece]  # of plugged memory
    emulated: bool

    @property
    def more(self) -> Hotplug:
        """The hardware beyond the template's."""
        return Hotplug(sum(cpu.plugged for cpu in self.cpus) - 1, sum(piece.mib for piece in self.pieces))


class Resizer:
    """Changes the sizes of VMs that run. Calls for one VM are served one after the other."""

    def __init__(self, reactor: IReactor, settings: QemuSettings) -> None:
        self._reactor = reactor
        self._settings = settings
        self._memory = PluggedMemory(settings.resize_timeout)
        self._vms_in_work: KeyedLock[str] = KeyedLock()

    async def resize(self, vm: Vm, size: Size, template: CommandLine, guest: IGuest | None = None) -> Size:
        """See `IResizesVms`. :param template: of VMs that are made now."""
        async with self._vms_in_work.held(vm.record.token):
            vm.check_running("resized")
            monitor = await vm.monitor(self._reactor)
            hardware = await _read(monitor, vm)
            own = attrs.evolve(template, memory_mib=hardware.base_mib, max_cpus=len(hardware.cpus))
            hotplug = hotplug_for(own, size, self._settings)
            plugged = await self._add_cpus(vm, monitor, hardware, hotplug.cpus if size.cpu_millis else 0)
            try:
                if size.all_bytes:
                    await self._memory.change(monitor, hardware.pieces, hotplug.memory_mib, guest)
            except BaseException:
                await self._take_back(vm, monitor, hardware, plugged)
                raise
            if size.cpu_millis:
                surplus = [cpu for cpu in hardware.cpus if cpu.plugged and cpu.core > hotplug.cpus]
                await self._take(vm, monitor, hardware, [cpu.device for cpu in reversed(surplus)])
            has = (await _read(monitor, vm)).more
            if guest is not None and size.cpu_millis and hardware.emulated:
                has = await _let_rest(vm, guest, has, hotplug)
        if has.cpus > hotplug.cpus and vm.record.cgroup_parent:
            has = attrs.evolve(has, cpus=hotplug.cpus)  # the pod's control group limits it
        return _size_for_pod(size, own, hotplug, has, self._settings)

    def unchanged(self, vm: Vm) -> AbstractAsyncContextManager[None]:
        """Change no memory and processors of a VM during the block; calls wait for its end."""
        return self._vms_in_work.held(vm.record.token)

    async def _add_cpus(
        self, vm: Vm, monitor: VmConnections, hardware: _Hardware, count: int
    ) -> Sequence[str]:
        """Plug in what is missing, all or none; return what was plugged in."""
        added: list[str] = []
        missing = [cpu for cpu in hardware.cpus if not cpu.plugged][: max(0, count - hardware.more.cpus)]
        try:
            for cpu in missing:
                # QEMU may still hold the name of a processor that was taken out.
                added.append(f"cpu{cpu.core}-{secrets.token_hex(4)}")
                device = {"driver": cpu.driver, "id": added[-1], **cpu.properties}
                await monitor.plug(device, self._settings.resize_timeout)
        except QmpError as error:
            await self._take_back(vm, monitor, hardware, added[:-1])
            raise _refused(error) from None
        except BaseException:
            await self._take_back(vm, monitor, hardware, added)
            raise
        return added

    async def _take_back(
        self, vm: Vm, monitor: VmConnections, hardware: _Hardware, added: Sequence[str]
    ) -> None:
        """Take out what a call that fails has plugged in; in its turn, however often it is cancelled."""
        await to_its_end(start(self._take(vm, monitor, hardware, added)))

    async def _take(self, vm: Vm, monitor: VmConnections, hardware: _Hardware, cpus: Sequence[str]) -> None:
        """Take out processors, until the guest keeps one."""
        for device in () if hardware.emulated else cpus:
            try:
                await monitor.qmp.execute("device_del", id=device)
                what = f"the guest's giving back {device}"
                await within(
                    self._reactor, self._settings.resize_timeout, self._gone(vm, monitor, device), what
                )
            except InfranetesError as error:
                _log.warn("VM {vm} keeps a processor: {error}", vm=vm.record.id, error=str(error))
                return

    async def _gone(self, vm: Vm, monitor: VmConnections, device: str) -> None:
        """Return when a processor is out. QEMU does not tell so with every accelerator."""
        pauses = backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        while any(cpu.device == device for cpu in (await _read(monitor, vm)).cpus):
            await sleep(self._reactor, next(pauses))


async def _let_rest(vm: Vm, guest: IGuest, has: Hotplug, hotplug: Hotplug) -> Hotplug:
    """Make the guest use only as many processors as its pod has. Return what it uses."""
    if not has.cpus:
        return has
    try:
        await guest.use_processors(hotplug.cpus + 1)
    except InfranetesError as error:
        _log.warn("VM {vm} uses the processors that it has: {error}", vm=vm.record.id, error=str(error))
        return has
    return attrs.evolve(has, cpus=min(has.cpus, hotplug.cpus))


def _size_for_pod(
    size: Size, own: CommandLine, hotplug: Hotplug, has: Hotplug, settings: QemuSettings
) -> Size:
    """Return the size that the VM has for its pod."""
    cpu_millis, memory = size.cpu_millis, size.memory_bytes
    if cpu_millis and (has.cpus != hotplug.cpus or (has.cpus + 1) * 1000 < cpu_millis):
        cpu_millis = (has.cpus + 1) * 1000
    if memory and has.memory_mib != hotplug.memory_mib:
        memory = memory_for_pod(own, has, size, settings)
    return attrs.evolve(size, cpu_millis=cpu_millis, memory_bytes=memory)


def _refused(error: QmpError) -> FailedPrecondition:
    return FailedPrecondition(f"the VM can't be made larger: {error}")


async def _read(monitor: VmConnections, vm: Vm) -> _Hardware:
    """Ask QEMU for the VM's hardware. :raise Unavailable: QEMU does not tell."""
    qmp = monitor.qmp
    try:
        places = await qmp.execute("query-hotpluggable-cpus")
        memory = await qmp.execute("query-memory-size-summary")
        devices = await qmp.execute("query-memory-devices")
        cpus = [
            _Cpu(
                driver=str(place["type"]),
                properties={str(name): int(value) for name, value in place["props"].items()},
                path=str(place.get("qom-path", "")),
            )
            for place in places
        ]
        pieces = [read_piece(device["data"]) for device in devices]
        emulated = not (await qmp.execute("query-kvm"))["enabled"]
        return _Hardware(sorted(cpus, key=_core_of), int(memory["base-memory"]) // MIB, pieces, emulated)
    except (InfranetesError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise Unavailable(f"VM {vm.record.id} does not say how large it is: {error!s:.200}") from None


def _core_of(cpu: _Cpu) -> int:
    return cpu.core
