# SPDX-License-Identifier: Apache-2.0
"""Keeps VMs as they run.

step      what it does                                        undone by `_restore`
layer     makes keep.qcow2 in the VM's directory, which is    removed, with what QEMU has of it
          the record of all that follows
capture   QEMU writes memory and devices; the VM is stopped   the VM goes on
          for a moment, and its disk gets the layer           what the layer has goes to the disk
go on     the VM executes
copy      the disk, which nobody writes to now, is copied

`_restore` comes last in any case. After a daemon that was killed, the next one makes up for it at its start.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from threading import Event

from twisted.internet.defer import CancelledError, DeferredSemaphore
from twisted.logger import Logger

from infranetes.providers.keeping import KeptVm
from infranetes.providers.qemu.keep import hardware
from infranetes.providers.qemu.keep.capture import Capture, Pause
from infranetes.providers.qemu.keep.disk import thd_copy
from infranetes.providers.qemu.keep.hardware import Hardware
from infranetes.providers.qemu.keep.layer import FILE, KeepLayer, thd_remove
from infranetes.providers.qemu.keep.memory import fill_memory
from infranetes.providers.qemu.keep.pipe import as_error, drained
from infranetes.providers.qemu.keep.state import HARDWARE, MEMORY
from infranetes.providers.qemu.program.qmp import QmpError
from infranetes.providers.qemu.settings import MIB
from infranetes.providers.qemu.template.template import DISK
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes.providers.qemu.vm.disks import as_unavailable
from infranetes.providers.qemu.vm.record import VmRecord
from infranetes.providers.qemu.vm.vm import Vm
from infranetes_common.concurrency import (
    KEEPING,
    Flight,
    KeyedLock,
    run_in_thread,
    settled,
    shielded,
    start,
    to_its_end,
    until_ended,
    within,
)
from infranetes_common.errors import FailedPrecondition, InfranetesError, ResourceExhausted, Unavailable
from infranetes_common.reactors import IReactor

_AT_ONCE = 2  # VMs, as many as there are threads for that
_SPARE = 64 * MIB  # of the node's disk, for what the VM writes meanwhile
_MOST_TIMES = 3  # how often the memory's size may be in the stream: see `capture`
_DISK_BLOCK = 512  # of st_blocks
_log = Logger()

Unchanged = Callable[[Vm], AbstractAsyncContextManager[frozenset[str]]]
"""Leaves a VM's hardware as it is during a block, and gives the names of the volumes that it has."""


class Keeper:
    """Keeps VMs; calls for one VM are served one after the other.

    :param room_of: as in `fill_memory`."""

    def __init__(
        self,
        reactor: IReactor,
        qemu_img: str,
        unchanged: Unchanged,
        room_of: Callable[[VmRecord], int | None],
    ) -> None:
        self._reactor = reactor
        self._qemu_img = qemu_img
        self._unchanged = unchanged
        self._room_of = room_of
        self._vms_in_work: KeyedLock[str] = KeyedLock()
        self._places = DeferredSemaphore(_AT_ONCE)
        self._under_way: list[Flight[KeptVm]] = []
        self._stopping = False
        self._changed: dict[str, Vm] = {}  # VMs that could not be restored, by token

    async def keep(self, vm: Vm, directory: Path, seconds: float) -> KeptVm:
        """See `IKeepsVms`."""
        if self._stopping:
            raise _stopping(vm)
        flight = Flight(self._keep(vm, directory, seconds))
        self._under_way.append(flight)
        try:
            kept = await flight.join()
            if self._stopping:
                raise _stopping(vm)
            return kept
        except CancelledError:
            if flight.done:
                raise _stopping(vm) from None
            flight.cancel()
            await settled([flight.join()])  # nobody writes to the directory any more
            raise
        finally:
            self._under_way.remove(flight)

    @asynccontextmanager
    async def none_of(self, vm: Vm) -> AsyncIterator[None]:
        """Keep nothing of a VM during the block, and have it be as it was before it was kept.

        :raise InfranetesError: it is not as before."""
        async with self._vms_in_work.held(vm.record.token):
            await self._restore(vm)
            yield

    async def resume(self, vms: Iterable[Vm]) -> None:
        """Let VMs go on that an earlier daemon was keeping when it was killed, and restore them."""
        self._stopping = False
        self._changed |= {vm.record.token: vm for vm in vms if _layer_file(vm).exists()}
        await self.tidy()

    async def tidy(self) -> None:
        """Try again to restore VMs that could not be."""
        changed = [vm for vm in self._changed.values() if vm.record.token not in self._vms_in_work.busy()]
        await settled(self._tidy(vm) for vm in changed)

    async def stop(self) -> None:
        """End all keeping. VMs go on."""
        self._stopping = True
        flights = (*self._under_way,)  # one that is cancelled may be over at once
        for flight in flights:
            flight.cancel()
        await settled([flight.join() for flight in flights])

    async def _tidy(self, vm: Vm) -> None:
        async with self._vms_in_work.held(vm.record.token):
            await self._restore_or_remember(vm)

    async def _keep(self, vm: Vm, directory: Path, seconds: float) -> KeptVm:
        _check(vm)
        keeping = within(self._reactor, seconds, self._in_turn(vm, directory), f"keeping VM {vm.record.id}")
        try:
            kept = await keeping
        except QmpError as error:
            raise as_unavailable(vm, "can't be kept", error) from error
        _log.info(
            "sandbox {sandbox}: VM {vm} is kept: {memory} MiB of memory, {disk} MiB of disk, paused for "
            "{pause:.3f} s, {seconds:.1f} s in all",
            sandbox=vm.record.sandbox_id,
            vm=vm.record.id,
            memory=kept.files[MEMORY] // MIB,
            disk=kept.files[DISK] // MIB,
            pause=kept.pause_seconds,
            seconds=kept.seconds,
        )
        return kept

    async def _in_turn(self, vm: Vm, directory: Path) -> KeptVm:
        async with self._vms_in_work.held(vm.record.token), self._places:
            _check(vm)
            began = self._reactor.seconds()
            await self._restore(vm)  # if an earlier keeping of it could not be undone
            try:
                pause, taken_at, machine = await self._capture(vm, directory)
                await self._copy_disk(vm, directory)
            finally:
                await to_its_end(start(self._restore_or_remember(vm)))  # in this VM's turn, whoever cancels
            files = {name: (directory / name).stat().st_size for name in (MEMORY, DISK, HARDWARE)}
            return KeptVm(taken_at, pause.seconds, self._reactor.seconds() - began, files, machine)

    async def _capture(self, vm: Vm, directory: Path) -> tuple[Pause, float, Mapping[str, str]]:
        """Write memory and devices. The VM goes on then, and writes to a layer of its own."""
        async with self._unchanged(vm) as volumes:
            if volumes:
                raise FailedPrecondition(
                    f"VM {vm.record.id} has volumes, whose content can't be kept with it: "
                    f"{', '.join(sorted(volumes))}"
                )
            monitor = await vm.monitor(self._reactor)
            machine = await hardware.read(monitor.qmp, vm.record, vm.paths.shown)
            await run_in_thread(self._reactor, _check_room, vm, directory, machine.memory)
            await fill_memory(self._reactor, vm, machine.memory_mib, self._room_of)
            layer = self._layer(vm, monitor)
            await layer.prepare(machine.disk)
            await run_in_thread(self._reactor, _thd_write, directory / HARDWARE, machine.encode())
            pause = Pause(self._reactor)
            taken_at = 0.0

            async def instant() -> None:
                nonlocal taken_at
                taken_at = time.time()
                await layer.insert()

            monitor.listeners.append(pause.heard)
            try:
                await self._stream(vm, monitor, directory / MEMORY, machine, instant)
            finally:
                monitor.listeners.remove(pause.heard)
        return pause, taken_at, machine.described()

    async def _stream(
        self,
        vm: Vm,
        monitor: VmConnections,
        path: Path,
        machine: Hardware,
        instant: Callable[[], Awaitable[object]],
    ) -> None:
        async with drained(self._reactor, path, _MOST_TIMES * machine.memory + _SPARE) as writer:
            try:
                await Capture(self._reactor, monitor.qmp).take(writer, instant, machine.emulated)
            finally:
                os.close(writer)
                going_on = start(self._go_on(vm))
                try:
                    await shielded(going_on)
                finally:
                    await until_ended(going_on)  # its hardware is left as it is until then

    async def _copy_disk(self, vm: Vm, directory: Path) -> None:
        stop = Event()
        await run_in_thread(
            self._reactor,
            thd_copy,
            vm.paths.disk,
            directory / DISK,
            stop,
            on_cancel=stop.set,
            purpose=KEEPING,
        )

    # ---- What the VM had before

    async def _go_on(self, vm: Vm) -> None:
        """Let a VM execute, if it is stopped."""
        if vm.alive:
            await Capture(self._reactor, (await vm.monitor(self._reactor)).qmp).let_go_on()

    async def _restore(self, vm: Vm) -> None:
        """Let a VM execute, and give it the disk that it had. Idempotent.

        :raise InfranetesError: not now; the VM executes, if QEMU answers."""
        if not _layer_file(vm).exists():
            return
        if vm.alive:
            await self._go_on(vm)
            await self._layer(vm, await vm.monitor(self._reactor)).remove()
        else:
            await run_in_thread(self._reactor, thd_remove, _layer_file(vm))

    async def _restore_or_remember(self, vm: Vm) -> None:
        token = vm.record.token
        try:
            await self._restore(vm)
        except (InfranetesError, OSError) as error:
            if vm.alive and not vm.destroying:
                self._changed[token] = vm
                _log.error(
                    "VM {vm}, which was kept, does not have the disk again that it had, for now: {error}",
                    vm=vm.record.id,
                    error=str(error),
                )
                return
        self._changed.pop(token, None)

    def _layer(self, vm: Vm, monitor: VmConnections) -> KeepLayer:
        return KeepLayer(self._reactor, monitor.qmp, _layer_file(vm), self._qemu_img)


def _layer_file(vm: Vm) -> Path:
    return vm.paths.directory / FILE


def _check(vm: Vm) -> None:
    vm.check_running("kept")
    if vm.record.guest is not None:
        raise FailedPrecondition(
            f"VM {vm.record.id} boots an image of its own: only VMs of containers can be kept"
        )
    if vm.record.kept:
        raise FailedPrecondition(
            f"VM {vm.record.id} was started from the kept state {vm.record.kept}, over which its disk is a "
            "layer: keep a VM that was started without one"
        )


def _check_room(vm: Vm, directory: Path, memory: int) -> None:
    disk = vm.paths.disk.stat().st_blocks * _DISK_BLOCK
    for path, needed in ((directory, memory + disk + _SPARE), (vm.paths.directory, _SPARE)):
        free = shutil.disk_usage(path).free
        if free < needed:
            raise ResourceExhausted(
                f"{path} has {free // MIB} MiB free, and keeping VM {vm.record.id} takes up to "
                f"{needed // MIB} MiB: make room"
            )


def _thd_write(path: Path, content: bytes) -> None:
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(content)
    except OSError as error:
        raise as_error(error, f"{path} can't be written") from None


def _stopping(vm: Vm) -> Unavailable:
    return Unavailable(f"VM {vm.record.id} is not kept: the daemon stops")
