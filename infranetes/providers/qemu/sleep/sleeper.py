# SPDX-License-Identifier: Apache-2.0
"""Lets VMs sleep, and wakes them. See the stages in `record`.

step      what it does                                        when it fails, or the daemon is killed
layers    the files of its disks are linked in its directory  they stay there, which does no harm
record    SAVING
save      QEMU writes memory and devices; the VM is stopped   the VM goes on, the memory's file is removed
record    ASLEEP
end       QEMU's process is killed                            is done again, at the latest to wake the VM
tap       the daemon makes the VM's tap, which joins again    likewise

process   QEMU, which waits                                   the process is killed, the VM sleeps on
load      QEMU loads memory and devices                       likewise; if it refuses them the VM has ended
record    GOING ON
execute                                                       the VM has ended; the next daemon does it again
record    is removed, then the memory, and the daemon's tap

A VM ends instead of waking if what it needs is gone or was changed: its memory, a file of its disks, the
release of QEMU, or the node's kernel was started anew.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from threading import Event
from typing import Protocol

import attrs
from twisted.internet.defer import CancelledError, DeferredSemaphore
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.providers.interface import ShownDisk
from infranetes.providers.qemu.cgroups.placement import Placement
from infranetes.providers.qemu.host.os_errors import as_infranetes_error
from infranetes.providers.qemu.host.privileges import unprivileged
from infranetes.providers.qemu.keep import hardware
from infranetes.providers.qemu.keep.capture import Capture
from infranetes.providers.qemu.keep.hardware import Hardware, add_plugged
from infranetes.providers.qemu.keep.memory import fill_memory
from infranetes.providers.qemu.keep.pipe import drained
from infranetes.providers.qemu.keep.preparer import thd_link
from infranetes.providers.qemu.keep.state import layer_file
from infranetes.providers.qemu.launch.uplink import Uplink
from infranetes.providers.qemu.network.bridge import open_tap
from infranetes.providers.qemu.program.command_line import CommandLine, Fd
from infranetes.providers.qemu.program.memory import Memory
from infranetes.providers.qemu.program.open_files import OpenFiles, open_files
from infranetes.providers.qemu.program.process import WatchedProcess, spawn
from infranetes.providers.qemu.program.sockets import IDENTITY, QMP
from infranetes.providers.qemu.settings import MIB
from infranetes.providers.qemu.sleep import record as records
from infranetes.providers.qemu.sleep.doorbell import Doorbell
from infranetes.providers.qemu.sleep.frames import Sleeping
from infranetes.providers.qemu.sleep.record import SleepRecord, SleptVolume, Stage
from infranetes.providers.qemu.sleep.slumber import Slumber
from infranetes.providers.qemu.template.ram import SharedRam, thd_fill
from infranetes.providers.qemu.template.template import DISK, IMAGES, RAM, Template
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes.providers.qemu.vm.disks import Disks, as_unavailable
from infranetes.providers.qemu.vm.record import VmRecord
from infranetes.providers.qemu.vm.vm import Vm
from infranetes.providers.sleeping import Slept
from infranetes_common.concurrency import KEEPING, Coro, Flight, run_in_thread, settled
from infranetes_common.errors import FailedPrecondition, InfranetesError, ResourceExhausted, Unavailable
from infranetes_common.reactors import IReactor

_AT_ONCE = 2  # VMs whose memory is written, as many as there are threads for that
_MOST_TIMES = 3  # how often the memory's size may be in the stream: see `keep.capture`
_SPARE = 64 * MIB
_log = Logger()


class _Unusable(InfranetesError):
    """The VM can't go on from what was written of it."""


@attrs.frozen
class Node:
    """The node as VMs that sleep need it.

    :ivar line: how QEMU is started now. :ivar unchanged: see `keep.keeper.Unchanged`, with volumes.
    :ivar exclusively: lets nobody keep a VM meanwhile. :ivar volumes: gives it its volumes.
    :ivar ended: called with a VM that has ended instead of waking."""

    uplink: Uplink
    placement: Placement
    disks: Disks
    ram: SharedRam
    template: Callable[[], Awaitable[Template]]
    line: Callable[[], CommandLine]
    exclusively: Callable[[Vm], AbstractAsyncContextManager[None]]
    unchanged: Callable[[Vm], AbstractAsyncContextManager[Sequence[SleptVolume]]]
    volumes: SleptVolumes
    ended: Callable[[Vm], Awaitable[None]]
    process_ended: Callable[[Vm], None]


class SleptVolumes(Protocol):
    """What has the volumes of VMs that sleep, so that no other VM gets them."""

    async def take(self, vm: Vm, volumes: Sequence[SleptVolume]) -> None:
        """Have the volumes of a VM without a process. Idempotent.

        :raise InfranetesError: one can't be had."""

    async def plug(self, vm: Vm, volumes: Sequence[SleptVolume]) -> None:
        """Give them to its process, which waits for its state. :raise InfranetesError: one can't be given."""

    def release(self, vm: Vm) -> None:
        """Have them no more: its process has, or it is gone. Idempotent."""


class Sleeper:
    """Lets VMs sleep, and wakes them. The provider calls it for one VM at a time.

    :param called: called with a VM that sleeps and is sent a packet. :param seconds: for its process to load
        its state."""

    def __init__(self, reactor: IReactor, node: Node, called: Callable[[Vm], None], seconds: float) -> None:
        self._reactor = reactor
        self._node = node
        self._called = called
        self._seconds = seconds
        self._places = DeferredSemaphore(_AT_ONCE)
        self._slumbers: dict[str, Slumber] = {}  # by token

    # ---- falling asleep

    async def sleep(self, vm: Vm) -> Slept:
        """See `ISleeps.sleep`. Cancelling it lets the VM go on, unless it sleeps already."""
        if (slumber := self._slumbers.get(vm.record.token)) is not None and slumber.asleep:
            return Slept(slumber.record.size, 0.0)
        began = self._reactor.seconds()
        _check(vm)
        async with self._node.exclusively(vm), self._places, self._node.unchanged(vm) as volumes:
            _check(vm)
            try:
                record = await self._record(vm, volumes)
                slumber = await self._save(vm, record)
            except OSError as error:
                raise as_infranetes_error(error) from error
            # From here on the VM sleeps, whatever becomes of this.
            await _whole(self._settle(vm, slumber))
        seconds, size = self._reactor.seconds() - began, slumber.record.size
        _log.info(
            "sandbox {sandbox}: VM {vm} sleeps, with {size} MiB on the disk, after {seconds:.2f} s",
            sandbox=vm.record.sandbox_id,
            vm=vm.record.id,
            size=size // MIB,
            seconds=seconds,
        )
        return Slept(size, seconds)

    async def _record(self, vm: Vm, volumes: Sequence[SleptVolume]) -> SleepRecord:
        """Return the record of a VM that is about to be saved, and have what it names.

        :raise InfranetesError: it can't sleep."""
        template = await self._node.template()
        made_at = await run_in_thread(self._reactor, template.made_at)
        if (vm.record.template, vm.record.template_made_at) != (template.directory.name, made_at):
            raise FailedPrecondition(
                f"VM {vm.record.id} was made of another template than VMs start from now, because QEMU, the "
                "guest image or the configuration has changed: recreate its pod to let it sleep"
            )
        monitor = await vm.monitor(self._reactor)
        machine = await hardware.read(monitor.qmp, vm.record, vm.paths.shown)
        directory = vm.paths.directory
        await run_in_thread(self._reactor, _thd_check_room, vm, machine.memory)
        await self._link_layers(directory, machine)
        line, boot = template.command_line, await run_in_thread(self._reactor, records.thd_boot_id)
        return SleepRecord(
            Stage.SAVING,
            boot,
            line.qemu,
            line.version,
            tuple(line.clone_arguments(kept=bool(vm.record.kept))),
            tuple(_files(vm.record, template)),
            machine,
            tuple(volumes),
        )

    async def _link_layers(self, directory: Path, machine: Hardware) -> None:
        if unknown := [disk.name for disk in machine.disks if not disk.path]:
            raise FailedPrecondition(
                f"this VM was shown {len(unknown)} disks by an earlier release, which did not note their "
                "files: recreate its pod to let it sleep"
            )
        unwanted = Event()
        await run_in_thread(
            self._reactor, thd_link, directory, machine, unwanted, on_cancel=unwanted.set, purpose=KEEPING
        )

    async def _save(self, vm: Vm, record: SleepRecord) -> Slumber:
        """Write memory and devices; the VM sleeps then, though its process may still be there.

        :raise InfranetesError, OSError: the VM goes on, and nothing is left."""
        directory = vm.paths.directory
        await self._write(directory, record)
        slumber = self._slumbers[vm.record.token] = vm.slumber = Slumber(record)
        try:
            await fill_memory(self._reactor, vm, record.hardware.memory_mib, self._node.placement.room)
            await self._stream(vm, directory / records.MEMORY, record.hardware)
            memory = await run_in_thread(self._reactor, records.thd_memory, directory)
            asleep = attrs.evolve(record, stage=Stage.ASLEEP, memory=memory)
            # Not cut short: what is on the disk is what the VM is.
            await _whole(self._note(vm, slumber, asleep))
        except BaseException:
            if not slumber.asleep:
                await _whole(self._go_on(vm, slumber))
            raise
        return slumber

    async def _note(self, vm: Vm, slumber: Slumber, record: SleepRecord) -> None:
        await self._write(vm.paths.directory, record)
        slumber.record = record

    async def _stream(self, vm: Vm, path: Path, machine: Hardware) -> None:
        await run_in_thread(self._reactor, functools.partial(path.unlink, missing_ok=True), purpose=KEEPING)
        monitor = await vm.monitor(self._reactor)
        async with drained(self._reactor, path, _MOST_TIMES * machine.memory + _SPARE) as writer:
            try:
                await Capture(self._reactor, monitor.qmp).take(writer, _nothing, machine.emulated)
            finally:
                os.close(writer)
            with suppress(InfranetesError):  # it has none then
                await monitor.qmp.execute("closefd", fdname="keep")

    async def _go_on(self, vm: Vm, slumber: Slumber) -> None:
        """Let a VM execute that is not asleep, and remove what was written of it. Idempotent.

        It may have loaded what was written, and have no link yet."""
        try:
            if vm.alive:
                monitor = await vm.monitor(self._reactor)
                await Capture(self._reactor, monitor.qmp).let_go_on()
                if slumber.record.stage is Stage.GOING_ON:
                    await monitor.resume()
        except InfranetesError as error:
            _log.error("VM {vm} does not go on: {error}", vm=vm.record.id, error=str(error))
            raise
        await run_in_thread(self._reactor, records.thd_remove, vm.paths.directory, purpose=KEEPING)
        self._forget(vm)
        vm.changes.notify()

    async def _settle(self, vm: Vm, slumber: Slumber) -> None:
        """End the process of a VM that sleeps, and have its tap and its volumes. Idempotent.

        What fails is tried again to wake it."""
        try:
            await self._have(vm, slumber)
        except (InfranetesError, OSError) as error:
            _log.error("VM {vm} sleeps, and is not reached by packets for now: {error}",
                       vm=vm.record.id, error=str(error))  # fmt: skip

    async def _have(self, vm: Vm, slumber: Slumber) -> Doorbell:
        await self._end_process(vm)
        if slumber.held is None:
            slumber.held = await run_in_thread(self._reactor, _thd_hold, slumber.record)
        slumber.release_volumes = functools.partial(self._node.volumes.release, vm)
        await self._node.volumes.take(vm, slumber.record.volumes)
        if slumber.doorbell is None:
            descriptor = await run_in_thread(self._reactor, open_tap, vm.record.tap)
            try:
                network = await self._node.uplink.guest_network(vm)
                await self._node.uplink.join(vm)
            except BaseException:
                await run_in_thread(self._reactor, os.close, descriptor)
                raise
            sleeping = Sleeping.of(network.mac, (vm.record.address, *vm.record.more_addresses))
            slumber.doorbell = Doorbell(self._reactor, descriptor, sleeping, lambda: self._called(vm))
        slumber.doorbell.listen()
        return slumber.doorbell

    async def _end_process(self, vm: Vm) -> None:
        await vm.end_process(self._reactor)
        if vm.connections is not None:
            vm.connections.close()
        vm.connections = vm.process = None

    # ---- waking

    async def wake(self, vm: Vm) -> None:
        """See `ISleeps.wake`. Cancelling it lets the VM sleep on, unless it executes already."""
        slumber = self._slumbers.get(vm.record.token)
        if slumber is None or not slumber.asleep:
            if slumber is not None:  # it has loaded its state, and was not told to execute
                await self._go_on(vm, slumber)
            vm.check_running("woken")
            return
        began = self._reactor.seconds()
        try:
            await self._wake(vm, slumber)
        except (_Unusable, FileNotFoundError) as error:
            await _whole(self._end(vm, f"it could not be woken: {error}"))
            raise vm.ended_error() from None
        except (InfranetesError, OSError) as error:
            raise Unavailable(f"VM {vm.record.id} sleeps on: {as_infranetes_error(error)}") from error
        seconds = self._reactor.seconds() - began
        _log.info("sandbox {sandbox}: VM {vm} is awake after {seconds:.2f} s",
                  sandbox=vm.record.sandbox_id, vm=vm.record.id, seconds=seconds)  # fmt: skip

    async def _wake(self, vm: Vm, slumber: Slumber) -> None:
        doorbell = await self._have(vm, slumber)
        doorbell.rest()
        try:
            await self._check(vm, slumber.record)
            await self._load(vm, slumber, doorbell)
        except BaseException:
            await _whole(self._sleep_on(vm, slumber))
            raise
        await _whole(self._execute(vm, slumber))

    async def _sleep_on(self, vm: Vm, slumber: Slumber) -> None:
        with suppress(InfranetesError):
            await self._end_process(vm)
        if slumber.doorbell is not None:
            slumber.doorbell.listen()

    async def _check(self, vm: Vm, record: SleepRecord) -> None:
        """Check that the VM can go on. :raise _Unusable: it can't."""
        if (version := self._node.line().version) != record.version:
            raise _Unusable(f"QEMU is another release by now: {record.version} before, {version} now")
        try:
            memory = await run_in_thread(self._reactor, records.thd_memory, vm.paths.directory)
        except OSError as error:
            raise _Unusable(f"its memory on the disk can't be read: {error.strerror}") from None
        if memory != record.memory:
            raise _Unusable("its memory on the disk was changed or damaged")

    async def _load(self, vm: Vm, slumber: Slumber, doorbell: Doorbell) -> None:
        """Start a process, and have it load the VM's state. It executes nothing.

        :raise _Unusable: it refuses that. :raise InfranetesError, OSError: it could not be had."""
        record = slumber.record
        ram = vm.ram or await self._node.ram.of(Path(dict(record.files)[int(Fd.RAM)]))
        await run_in_thread(self._reactor, thd_fill, ram.fileno(), purpose=KEEPING)
        process = vm.process = await self._start(vm, slumber, doorbell, ram)
        await self._node.placement.place(vm.record, process.pid)
        connections = vm.connections = VmConnections(self._reactor, vm.heard, vm.lost)
        await connections.open_monitor(vm.paths.sockets)
        await add_plugged(connections.qmp, record.hardware, self._node.line())
        disks = [(ShownDisk(each.name, each.target, each.lun), layer_file(vm.paths.directory, each))
                 for each in record.hardware.disks]  # fmt: skip
        await self._node.disks.show_as_kept(vm, disks)
        await self._node.volumes.plug(vm, record.volumes)
        try:
            await connections.load_state(self._seconds, memory=True)
        except Unavailable as error:
            await process.ended().addTimeout(1.0, self._reactor).addErrback(lambda _: None)
            if process.code is not None and process.code < 0:  # killed, for want of memory for instance
                why = self._node.placement.why_ended(vm.record) or process.end
                raise Unavailable(f"{error}; {why}") from error
            last = await run_in_thread(self._reactor, vm.paths.last_output)
            raise _Unusable(f"QEMU does not take what was written of it: {last[-300:]}") from error
        vm.ram = ram

    async def _start(self, vm: Vm, slumber: Slumber, doorbell: Doorbell, ram: Memory) -> WatchedProcess:
        assert slumber.held is not None
        record = slumber.record
        async with open_files(self._reactor) as files:
            files.add(Fd.RAM, os.dup(ram.fileno()))
            files.add(Fd.TAP, doorbell.duplicate())
            for number, descriptor in slumber.held.by_number().items():
                files.add(number, os.dup(descriptor))
            await run_in_thread(self._reactor, _thd_open, files, vm)
            command = [record.program, "-name", vm.record.process_name, *record.arguments]
            child = spawn(
                self._reactor, unprivileged(command, vm.paths.user, dies_with_parent=False), files.by_number()
            )
        return WatchedProcess(self._reactor, child.pid, lambda: self._node.process_ended(vm), child)

    async def _execute(self, vm: Vm, slumber: Slumber) -> None:
        """Let a VM execute that has loaded its state. :raise InfranetesError: it has ended."""
        assert vm.connections is not None
        try:
            await self._note(vm, slumber, attrs.evolve(slumber.record, stage=Stage.GOING_ON))
        except OSError:
            await self._sleep_on(vm, slumber)
            raise
        try:
            if vm.process is not None and vm.process.gone:
                self._node.process_ended(vm)  # which it was not told before
            await vm.connections.resume()
        except InfranetesError as error:
            raise as_unavailable(vm, "does not go on", error) from error
        finally:
            await slumber.close(self._reactor)
        await run_in_thread(self._reactor, records.thd_remove, vm.paths.directory, purpose=KEEPING)
        self._forget(vm)
        vm.changes.notify()

    async def _end(self, vm: Vm, why: str) -> None:
        """Have a VM be one that has ended."""
        await self._end_process(vm)
        vm.record = attrs.evolve(vm.record, detail=why)
        if (slumber := self._forget(vm)) is not None:
            await slumber.close(self._reactor)
        with suppress(OSError):
            await run_in_thread(self._reactor, records.thd_remove, vm.paths.directory, purpose=KEEPING)
        await self._node.ended(vm)

    async def forget(self, vm: Vm) -> None:
        """Have nothing of a VM any more: it is to be destroyed. Idempotent."""
        if (slumber := self._forget(vm)) is not None:
            await slumber.close(self._reactor)

    def _forget(self, vm: Vm) -> Slumber | None:
        vm.slumber = None
        return self._slumbers.pop(vm.record.token, None)

    @property
    def size(self) -> int:
        """The bytes that the memory of all VMs that sleep takes."""
        return sum(each.record.size for each in self._slumbers.values() if each.asleep)

    # ---- the next daemon

    async def find(self, vm: Vm) -> None:
        """Find out how an earlier daemon has left a VM."""
        try:
            record = await run_in_thread(self._reactor, records.thd_read, vm.paths.directory)
        except ValueError as error:
            if not vm.alive:
                vm.record = attrs.evolve(vm.record, detail=f"it could not be woken: {error}")
            _log.error("{error}", error=str(error))
            return
        if record is not None:
            self._slumbers[vm.record.token] = vm.slumber = Slumber(record)

    async def go_on(self, vms: Iterable[Vm]) -> None:
        """Let VMs go on that earlier daemons have left half asleep, or half awake."""
        left = [(vm, each) for vm in vms if (each := self._slumbers.get(vm.record.token)) and not each.asleep]
        outcomes = await settled(self._go_on(vm, slumber) for vm, slumber in left)
        for (vm, _), outcome in zip(left, outcomes, strict=True):
            if isinstance(outcome, Failure):
                _log.error("VM {vm}: {error}", vm=vm.record.id, error=outcome.getErrorMessage())

    async def resume(self, vms: Iterable[Vm]) -> None:
        """Have VMs that sleep since an earlier daemon. Those of an earlier start of the node have ended."""
        boot = await run_in_thread(self._reactor, records.thd_boot_id)
        for vm in vms:
            slumber = self._slumbers.get(vm.record.token)
            if slumber is None or not slumber.asleep:
                continue
            if slumber.record.boot_id != boot:
                await self._end(vm, "the node was started anew while it slept")
            else:
                await self._settle(vm, slumber)

    async def _write(self, directory: Path, record: SleepRecord) -> None:
        await run_in_thread(self._reactor, records.thd_write, directory, record, purpose=KEEPING)


async def _whole(work: Coro[None]) -> None:
    """Do work to its end, also when the caller is cancelled meanwhile."""
    doing = Flight(work)
    while True:
        try:
            return await doing.join()
        except CancelledError:
            if doing.done:
                raise


async def _nothing() -> None:
    pass


def _check(vm: Vm) -> None:
    vm.check_running("put to sleep")
    if vm.record.guest is not None:
        raise FailedPrecondition(
            f"VM {vm.record.id} boots an image of its own: only VMs of containers can sleep"
        )
    if vm.record.kept and not (Path(vm.record.kept) / DISK).exists():
        raise FailedPrecondition(
            f"VM {vm.record.id} was started from the kept state {vm.record.kept}, which was removed: its "
            "disk is a layer over that, so that it can't sleep"
        )


def _files(record: VmRecord, template: Template) -> list[tuple[int, str]]:
    """Return the files that a process of a VM inherits, beside its own."""
    origin = Path(record.kept) if record.kept else template.directory
    files = {
        Fd.RAM: origin / RAM,
        Fd.TEMPLATE_DISK: template.directory / DISK,
        Fd.IMAGE_DISK: template.image.disk,
    }
    if record.kept:
        files[Fd.KEPT_DISK] = origin / DISK
    if template.command_line.preload:
        files[Fd.IMAGES] = template.directory / IMAGES
    return [(int(number), str(path)) for number, path in files.items()]


def _thd_hold(record: SleepRecord) -> OpenFiles:
    """Open the files that others may remove while the VM sleeps. Blocks. :raise OSError: one is gone."""
    files = OpenFiles()
    try:
        for number, path in record.files:
            if number != Fd.RAM:
                files.open(number, Path(path))
    except BaseException:
        files.close()
        raise
    return files


def _thd_open(files: OpenFiles, vm: Vm) -> None:
    """Open what is the VM's own. Blocks."""
    paths = vm.paths
    paths.sockets.mkdir(mode=0o700, exist_ok=True)
    files.open(Fd.STATE, paths.directory / records.MEMORY)
    files.set_standard_streams(paths.output)
    files.open(Fd.DISK, paths.disk, os.O_RDWR)
    files.open(Fd.CONSOLE, paths.console, os.O_RDWR)
    files.listen(Fd.QMP, paths.sockets / QMP)
    files.listen(Fd.IDENTITY, paths.sockets / IDENTITY)
    files.listen(Fd.AGENT, paths.agent_port)


def _thd_check_room(vm: Vm, memory: int) -> None:
    free = shutil.disk_usage(vm.paths.directory).free
    if free < memory + _SPARE:
        raise ResourceExhausted(
            f"{vm.paths.directory} has {free // MIB} MiB free, and the memory of VM {vm.record.id} takes up "
            f"to {(memory + _SPARE) // MIB} MiB: make room in state_dir"
        )
