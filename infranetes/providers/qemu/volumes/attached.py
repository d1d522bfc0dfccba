# SPDX-License-Identifier: Apache-2.0
"""The volumes that a running VM has as disks, at a target of its SCSI controller that is theirs alone.

QEMU alone keeps which volumes a VM has, as with the disks of `vm.disks`, but for its root, if that is a
volume: that is in the VM's record, and stays the VM's for as long as there is one.

thing       named              made by
descriptor  volume-SERIAL      add-fd        goes once the node has a descriptor of its own
node        volume-SERIAL      blockdev-add
device      volume-LUN-SERIAL  device_add

A volume's file is locked (flock) by the open file that QEMU was given, and by nothing else: the lock is there
for exactly as long as a QEMU can write to it, whoever is killed, and no second VM gets it meanwhile. What an
interrupted call has left of a disk holds it too, until the next call for that VM removes it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import attrs
from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.providers.qemu.program.command_line import SCSI
from infranetes.providers.qemu.program.image_line import ROOT
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes.providers.qemu.vm.disks import as_unavailable, entries
from infranetes.providers.qemu.vm.vm import Vm
from infranetes.providers.qemu.volumes import mirrors
from infranetes.providers.qemu.volumes.opened import VolumeFile, make_direct, open_volume
from infranetes.providers.volumes import ROOT_SERIAL
from infranetes_common.concurrency import Coro, KeyedLock, deferred, run_in_thread, settled
from infranetes_common.errors import (
    FailedPrecondition,
    InfranetesError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.reactors import IReactor
from infranetes_common.volume_disks import TARGET, serial_of

MOST = 64  # volumes of one VM
_UNPLUG_SECONDS = 10.0
_DEVICE = re.compile(r"volume-([0-9]{1,3})-([0-9a-f]{20})")
_NODE = re.compile(r"volume-([0-9a-f]{20})")
_log = Logger()

T = TypeVar("T")


@attrs.frozen
class _State:
    """QEMU's state of a VM's volumes: LUNs, and whether a node is read-only, by serial."""

    luns: Mapping[str, int]
    nodes: Mapping[str, bool]
    files: Mapping[int, str]  # file sets that no node has opened yet: the serial, by the set's number

    def rests(self) -> list[str]:
        """Return the serials of nodes without a device."""
        return sorted(set(self.nodes) - set(self.luns))


class AttachedVolumes:
    """Attaches volumes to VMs. Calls for one VM are served one after the other."""

    def __init__(self, reactor: IReactor) -> None:
        self._reactor = reactor
        self._vms_in_work: KeyedLock[str] = KeyedLock()

    async def attach(self, vm: Vm, volume: str, path: Path, read_only: bool) -> str:
        """See `IVolumes`. :param path: the volume's file, or block device."""
        serial = serial_of(volume)
        async with self._vms_in_work.held(vm.record.token):
            vm.check_running("given volumes")
            if vm.record.root == volume:
                _check_mode(vm, volume, read_only, False)
                return ROOT_SERIAL
            state = await self._tidied(vm)
            if serial in state.luns:
                _check_mode(vm, volume, read_only, state.nodes.get(serial, read_only))
                return serial
            lun = _free_lun(vm, state)
            file = await run_in_thread(self._reactor, open_volume, volume, path, read_only)
            monitor = await self._monitor_or_close(vm, file)
            try:
                await _plug(monitor, serial, lun, file, read_only)
            except InfranetesError as error:
                await self._undo(vm, serial)
                raise as_unavailable(vm, f"can't be given volume {volume}", error) from error
            finally:
                os.close(file.descriptor)
        return serial

    @asynccontextmanager
    async def unchanged(self, vm: Vm) -> AsyncIterator[frozenset[str]]:
        """Attach and detach no volumes of a running VM during the block; calls wait for its end. Give the
        serials of those that it has. :raise Unavailable: QEMU does not answer."""
        async with self._vms_in_work.held(vm.record.token):
            yield frozenset((await self._read(vm)).luns)

    async def places(self, vm: Vm) -> Mapping[str, tuple[int, bool]]:
        """Return the LUN of each volume that a running VM has, and whether it is read-only, by serial.

        The caller holds `unchanged`. :raise Unavailable: QEMU does not answer."""
        state = await self._read(vm)
        return {serial: (lun, state.nodes.get(serial, False)) for serial, lun in state.luns.items()}

    async def plug_again(self, vm: Vm, serial: str, lun: int, file: VolumeFile, read_only: bool) -> None:
        """Give a VM that waits for its state a volume that it had. :raise Unavailable: QEMU does not."""
        monitor = await vm.monitor(self._reactor)
        try:
            await monitor.qmp.execute("query-status")  # QEMU takes files after its first answer
            await _plug(monitor, serial, lun, file, read_only)
        except InfranetesError as error:
            raise as_unavailable(vm, "can't be given its volumes again", error) from error

    async def attached(self, vm: Vm) -> frozenset[str]:
        """Return the serials of the volumes that a VM has; one that does not run has none."""
        async with self._vms_in_work.held(vm.record.token):
            if vm.slumber is not None and vm.slumber.asleep:
                return frozenset(vm.slumber.serials)
            if not vm.usable:
                return frozenset()
            return frozenset((await self._read(vm)).luns)

    async def detach(self, vm: Vm, volume: str) -> None:
        """See `IVolumes`."""
        async with self._vms_in_work.held(vm.record.token):
            if vm.record.root == volume:
                raise Unavailable(
                    f"volume {volume} is the root of VM {vm.record.id}: it is free once that VM is gone"
                )
            _check_awake(vm, volume)
            if vm.usable:
                await self._remove(vm, serial_of(volume), volume)

    async def resize(self, vm: Vm, volume: str, size: int) -> bool:
        """Make a VM see that a volume's file has become larger. Return whether it has the volume."""
        async with self._vms_in_work.held(vm.record.token):
            _check_awake(vm, volume)
            if (node := await self._node_with(vm, volume)) is None:
                return False
            monitor = await vm.monitor(self._reactor)
            try:
                await monitor.qmp.execute("block_resize", node_name=node, size=size)
            except InfranetesError as error:
                raise as_unavailable(vm, f"does not see the new size of volume {volume}", error) from error
        return True

    async def mirror(self, vm: Vm, volume: str, target: int) -> float | None:
        """Copy a volume while the VM has it, to a file of the same size that is open. Return the time of the
        copy's content; None: the VM has no such volume."""
        serial = serial_of(volume)
        async with self._vms_in_work.held(vm.record.token):
            if (node := await self._node_with(vm, volume)) is None:
                return None
        return await mirrors.mirror(self._reactor, vm, serial, node, target, make_direct(target))

    async def end_mirrors(self, vm: Vm) -> None:
        """End the copies of a VM's volumes that an earlier daemon began."""
        await mirrors.clear_all(self._reactor, vm)

    async def _node_with(self, vm: Vm, volume: str) -> str | None:
        """Return the name of QEMU's node of a volume; None: the VM does not have it."""
        if not vm.usable:
            return None
        if vm.record.root == volume:
            return ROOT
        serial = serial_of(volume)
        return _node_id(serial) if serial in (await self._read(vm)).luns else None

    async def _monitor_or_close(self, vm: Vm, file: VolumeFile) -> VmConnections:
        try:
            return await vm.monitor(self._reactor)
        except BaseException:
            os.close(file.descriptor)
            raise

    async def _undo(self, vm: Vm, serial: str) -> None:
        try:
            await self._remove(vm, serial, serial)
        except InfranetesError as error:
            _log.warn(
                "VM {vm}: a volume that can't be attached is not cleaned up for now: {error}",
                vm=vm.record.id,
                error=error,
            )

    async def _remove(self, vm: Vm, serial: str, volume: str) -> None:
        monitor = await vm.monitor(self._reactor)
        state = await self._read(vm)
        failure: InfranetesError | None = None
        if serial in state.nodes:
            try:
                await mirrors.clear(self._reactor, monitor.qmp, serial)  # a killed daemon may have left one
            except InfranetesError as error:
                failure = error
        if serial in state.luns:
            try:
                await monitor.unplug(_device_id(state.luns[serial], serial), _UNPLUG_SECONDS)
            except InfranetesError as error:
                failure = error
        left = await self._tidied(vm)
        if serial not in left.luns and serial not in left.nodes and serial not in left.files.values():
            return
        why = f": {failure}" if failure is not None else ""
        raise Unavailable(
            f"VM {vm.record.id} does not give up volume {volume}{why}. It stays attached, and no other VM "
            "gets it. Try again; ending the VM frees it in any case"
        )

    async def _tidied(self, vm: Vm) -> _State:
        """Return the state, after removing what interrupted calls have left, as far as QEMU does not use
        it."""
        monitor = await vm.monitor(self._reactor)
        state = await self._read(vm)
        if not state.files and not state.rests():
            return state
        rests = [monitor.qmp.execute("remove-fd", fdset_id=number) for number in state.files]
        rests += [monitor.qmp.execute("blockdev-del", node_name=_node_id(one)) for one in state.rests()]
        for outcome in await settled(rests):
            if isinstance(outcome, Failure):
                _log.warn(
                    "VM {vm}: a detached volume is not cleaned up for now: {error}",
                    vm=vm.record.id,
                    error=outcome.getErrorMessage(),
                )
        return await self._read(vm)

    async def _read(self, vm: Vm) -> _State:
        """Ask QEMU for its state of the VM's volumes. :raise Unavailable: it does not answer."""
        qmp = (await vm.monitor(self._reactor)).qmp
        asked = (  # all at once: an emulated VM keeps QEMU busy, which delays each answer
            qmp.execute("qom-list", path="/machine/peripheral"),
            qmp.execute("query-named-block-nodes", flat=True),
            qmp.execute("query-fdsets"),
        )
        answers = await settled(asked)
        for answer in answers:
            if isinstance(answer, Failure):
                if not isinstance(answer.value, InfranetesError):
                    answer.raiseException()
                raise as_unavailable(vm, "does not say which volumes it has", answer.value) from answer.value
        devices, nodes, file_sets = (entries(answer) for answer in answers)
        found = [match for entry in devices if (match := _DEVICE.fullmatch(str(entry.get("name"))))]
        named = [(_NODE.fullmatch(str(entry.get("node-name"))), entry.get("ro") is True) for entry in nodes]
        return _State(
            {match[2]: int(match[1]) for match in found},
            {match[1]: read_only for match, read_only in named if match},
            dict(file for entry in file_sets for file in _unopened(entry)),
        )


class ToTheEnd(Protocol):
    """Starts work that goes on when its caller is cancelled."""

    def __call__(self, work: Coro[T]) -> Deferred[T]: ...


class VolumeAttacher:
    """The volumes of all VMs, as `IVolumes` has them; the caller knows where their files are.

    :param find: the VM with an instance's id. :param vms: all of them.
    :ivar volumes: those of one VM.
    """

    def __init__(
        self,
        reactor: IReactor,
        find: Callable[[str], Vm],
        vms: Callable[[], Sequence[Vm]],
        to_the_end: ToTheEnd,
    ) -> None:
        self.volumes = AttachedVolumes(reactor)
        self._find = find
        self._vms = vms
        self._to_the_end = to_the_end

    @deferred
    async def attach(self, instance_id: str, volume: str, path: Path, read_only: bool) -> str:
        """See `IVolumes.attach`. :param path: the volume's file, or block device."""
        attaching = self.volumes.attach(self._find(instance_id), volume, path, read_only)
        return await self._to_the_end(attaching)

    @deferred
    async def detach(self, instance_id: str, volume: str) -> None:
        """See `IVolumes.detach`."""
        try:
            vm = self._find(instance_id)
        except NotFound:
            return
        await self._to_the_end(self.volumes.detach(vm, volume))

    def check_no_root(self, volume: str) -> None:
        """Check that a volume is the root of no VM, even if its guest has ended.

        :raise FailedPrecondition: it is one's."""
        for vm in self._vms():
            if vm.record.root == volume:
                raise FailedPrecondition(
                    f"volume {volume} is attached to a VM, {vm.record.id}, whose root it is: it is free once "
                    "its pod is gone"
                )

    @deferred
    async def mirror(self, volume: str, target: int) -> float:
        """Copy a volume that a VM has to a file of the same size, which is open. Return the time of the
        copy's content. Cancelling it ends the copy.

        :raise Unavailable: no VM has it, or the VM that has it ends."""
        for vm in self._vms():
            instant = await self.volumes.mirror(vm, volume, target)
            if instant is not None:
                return instant
        raise Unavailable(f"volume {volume} is in use, and no VM has it: it is being changed. Try again")

    @deferred
    async def end_mirrors(self) -> None:
        """End the copies that an earlier daemon began. :raise Unavailable: a QEMU does not end one."""
        for outcome in await settled(self.volumes.end_mirrors(vm) for vm in self._vms()):
            if isinstance(outcome, Failure):
                outcome.raiseException()

    @deferred
    async def grown(self, volume: str, size: int) -> None:
        """Make the VM that has a volume, if there is one, see the new size of its file."""
        for vm in self._vms():
            if await self._to_the_end(self.volumes.resize(vm, volume, size)):
                return


def _check_awake(vm: Vm, volume: str) -> None:
    """Check that a VM which has a volume does not sleep. :raise Unavailable: it does."""
    if vm.slumber is not None and vm.slumber.asleep and serial_of(volume) in vm.slumber.serials:
        raise Unavailable(f"volume {volume} is attached to VM {vm.record.id}, which sleeps: wake it first")


def _check_mode(vm: Vm, volume: str, read_only: bool, now_read_only: bool) -> None:
    """Check that a volume is in the mode that is asked for. :raise FailedPrecondition: it is in the other."""
    if now_read_only is not read_only:
        mode = "read-only" if now_read_only else "for writing"
        raise FailedPrecondition(
            f"volume {volume} is attached to VM {vm.record.id} {mode}: detach it first to change that"
        )


def _free_lun(vm: Vm, state: _State) -> int:
    taken = set(state.luns.values())
    for lun in range(MOST):
        if lun not in taken:
            return lun
    raise ResourceExhausted(f"VM {vm.record.id} has {MOST} volumes: QEMU's provider attaches no more to a VM")


def _unopened(file_set: Mapping[str, object]) -> list[tuple[int, str]]:
    number = file_set.get("fdset-id")
    found = [_NODE.fullmatch(str(file.get("opaque"))) for file in entries(file_set.get("fds"))]
    return [(number, match[1]) for match in found if match and isinstance(number, int)]


async def _plug(monitor: VmConnections, serial: str, lun: int, file: VolumeFile, read_only: bool) -> None:
    qmp, node = monitor.qmp, _node_id(serial)
    number = await qmp.add_file(node, file.descriptor)
    await qmp.execute(
        "blockdev-add",
        driver="file" if stat.S_ISREG(os.fstat(file.descriptor).st_mode) else "host_device",
        node_name=node,
        filename=f"/dev/fdset/{number}",
        read_only=read_only,
        auto_read_only=False,
        locking="off",  # instead of QEMU's own locks there is the one on the file; see above
        discard="unmap",
        cache={"direct": file.direct, "no-flush": False},  # what the guest flushes reaches the disk
    )
    await qmp.execute("remove-fd", fdset_id=number)  # the node has a descriptor of its own
    await qmp.execute(
        "device_add",
        driver="scsi-hd",
        id=_device_id(lun, serial),
        bus=f"{SCSI}.0",
        scsi_id=TARGET,
        lun=lun,
        drive=node,
        serial=serial,
        # By default, QEMU halts a VM when its disk is full on the node: then nothing in the pod would answer.
        werror="report",
        rerror="report",
    )


def _device_id(lun: int, serial: str) -> str:
    return f"volume-{lun}-{serial}"


def _node_id(serial: str) -> str:
    return f"volume-{serial}"
