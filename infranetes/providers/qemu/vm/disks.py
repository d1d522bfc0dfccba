# SPDX-License-Identifier: Apache-2.0
"""The read-only disks that a running VM is shown: files of the node, plugged into its SCSI controller.

QEMU alone keeps which disks a VM has, in the names of three things. A daemon that follows one which was
killed reads them there. Links in the VM's directory say where the disks' files are, for who keeps the VM.

thing       named                       made by
descriptor  infranetes-NAME             add-fd        goes once the node has a descriptor of its own
node        shown-TARGET-LUN-BEGINNING  blockdev-add  a node's name has at most 31 characters
device      shown-TARGET-LUN-NAME       device_add

A device is a disk that is shown. A descriptor or node without one is the rest of a call that was interrupted,
and the next call removes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import attrs
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.providers.interface import ReadOnlyDisk, ShownDisk
from infranetes.providers.qemu.program.command_line import SCSI
from infranetes.providers.qemu.program.qmp import QmpConnection
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes.providers.qemu.vm.vm import Vm
from infranetes_common.concurrency import KeyedLock, run_in_thread, settled
from infranetes_common.errors import (
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.reactors import IReactor

# A VM's QEMU holds one descriptor for each disk, and has only 1024 if the daemon is not started by systemd.
MOST = 512
_LUNS = 256  # LUNs of one target; higher ones are addressed in another way
_SECTOR = 512
_UNPLUG_SECONDS = 10.0
_FILE = "infranetes-"
_DEVICE = re.compile(r"shown-([0-9]{1,3})-([0-9]{1,3})-([0-9a-f]{64})")
_NODE = re.compile(r"shown-([0-9]{1,3})-([0-9]{1,3})-([0-9a-f]{16})")
_SERIAL = 36  # characters, QEMU's limit; the agent knows by the serial which disk has come
_DEVICE_ID = 20  # characters, QEMU's limit; the default is the serial, and 9.1 and later refuse a longer one
_BEGINNING = 16  # characters of a disk's name in the name of its node
_NAME = re.compile(r"[0-9a-f]{64}")
_log = Logger()


@attrs.frozen
class _State:
    """QEMU's state of a VM's disks."""

    shown: Mapping[str, ShownDisk]  # by name
    nodes: frozenset[str]
    files: Sequence[int]  # numbers of file sets that no node has opened yet

    def leftovers(self) -> list[str]:
        """Return the nodes without a device."""
        return sorted(self.nodes - {node_id(disk) for disk in self.shown.values()})

    def free_places(self, last: int) -> Iterator[tuple[int, int]]:
        """Each target and LUN that nothing is at, those after the place number `last` first.

        A guest may learn that a disk came before it learns that the one before at the same place went, and
        then lose the new one. So a place rests while there are others.
        """
        taken = {(disk.target, disk.lun) for disk in self.shown.values()}
        taken |= {_place(match) for node in self.nodes if (match := _NODE.fullmatch(node))}
        places = (divmod((last + 1 + number) % MOST, _LUNS) for number in range(MOST))
        return (place for place in places if place not in taken)


class Disks:
    """Shows files of the node to VMs. Calls for one VM are served one after the other."""

    def __init__(self, reactor: IReactor) -> None:
        self._reactor = reactor
        self._vms_in_work: KeyedLock[str] = KeyedLock()

    async def show(self, vm: Vm, disks: Sequence[ReadOnlyDisk]) -> Sequence[ShownDisk]:
        """See `IShowsDisks`."""
        by_name = {_checked(disk).name: disk for disk in disks}
        async with self._vms_in_work.held(vm.record.token):
            vm.check_running("shown disks")
            state = await self._tidied(vm)
            lacking = [disk for name, disk in by_name.items() if name not in state.shown]
            added = await self._add(vm, lacking, state) if lacking else {}
        shown = {**state.shown, **added}
        return [shown[disk.name] for disk in disks]

    async def show_first(self, vm: Vm, disks: Sequence[ReadOnlyDisk]) -> None:
        """Show disks to a VM that has none and does not execute yet, all or none. Fails as `show` does."""
        async with self._vms_in_work.held(vm.record.token):
            await self._add(vm, [_checked(disk) for disk in disks], _State({}, frozenset(), ()))

    async def show_as_kept(self, vm: Vm, disks: Sequence[tuple[ShownDisk, Path]]) -> None:
        """Show disks at the places that they had in a kept VM, to a VM that has none and no state yet.

        Fails as `show` does."""
        files = [ReadOnlyDisk(disk.name, path) for disk, path in disks]
        async with self._vms_in_work.held(vm.record.token):
            # QEMU takes files after its first answer.
            await (await vm.monitor(self._reactor)).qmp.execute("query-status")
            await self._plug_in(vm, [disk for disk, _ in disks], files)

    async def shown(self, vm: Vm) -> Sequence[ShownDisk]:
        """See `IShowsDisks`."""
        async with self._vms_in_work.held(vm.record.token):
            if not vm.usable:
                return ()
            state = await _read(await vm.monitor(self._reactor), vm)
        return sorted(state.shown.values(), key=lambda disk: (disk.target, disk.lun))

    async def hide(self, vm: Vm, names: Iterable[str]) -> None:
        """See `IShowsDisks`."""
        async with self._vms_in_work.held(vm.record.token):
            if vm.usable:
                await self._remove(vm, set(names))

    def unchanged(self, vm: Vm) -> AbstractAsyncContextManager[None]:
        """Change no disks of a VM during the block; calls wait for its end."""
        return self._vms_in_work.held(vm.record.token)

    async def _add(self, vm: Vm, disks: Sequence[ReadOnlyDisk], state: _State) -> Mapping[str, ShownDisk]:
        """Plug in disks, all or none."""
        places = list(state.free_places(vm.last_place))
        if len(disks) > len(places):
            raise ResourceExhausted(
                f"VM {vm.record.id} has {MOST - len(places)} disks and can't have {len(disks)} more: QEMU's "
                f"provider shows at most {MOST} to a VM; use images with fewer layers, or fewer in one pod"
            )
        added = [
            ShownDisk(disk.name, target, lun) for disk, (target, lun) in zip(disks, places, strict=False)
        ]
        await self._plug_in(vm, added, disks)
        return {disk.name: disk for disk in added}

    async def _plug_in(self, vm: Vm, added: Sequence[ShownDisk], disks: Sequence[ReadOnlyDisk]) -> None:
        monitor = await vm.monitor(self._reactor)
        files = await run_in_thread(self._reactor, _thd_open, disks)
        try:
            await run_in_thread(self._reactor, _thd_note, vm.paths.shown, disks)
            if added:
                vm.last_place = added[-1].target * _LUNS + added[-1].lun
            outcomes = await settled(
                _plug(monitor, disk, file) for disk, file in zip(added, files, strict=True)
            )
        finally:
            for file in files:
                os.close(file)
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        if failures:
            await self._undo(vm, added)
            raise as_unavailable(vm, "can't be shown its disks", failures[0])

    async def _undo(self, vm: Vm, added: Sequence[ShownDisk]) -> None:
        try:
            await self._remove(vm, {disk.name for disk in added})
        except InfranetesError as error:
            _log.warn(
                "VM {vm}: {count} disks that can't all be attached are not cleaned up for now: {error}",
                vm=vm.record.id,
                count=len(added),
                error=str(error),
            )

    async def _remove(self, vm: Vm, names: set[str]) -> None:
        monitor = await vm.monitor(self._reactor)
        state = await _read(monitor, vm)
        outcomes = await settled(
            monitor.unplug(_device_id(disk), _UNPLUG_SECONDS)
            for name, disk in state.shown.items()
            if name in names
        )
        left = (await self._tidied(vm)).leftovers()
        for outcome in outcomes:
            if isinstance(outcome, Failure):
                raise as_unavailable(vm, "does not give up its disks", outcome)
        beginnings = {name[:_BEGINNING] for name in names}
        if held := [node for node in left if node.rpartition("-")[2] in beginnings]:
            raise Unavailable(f"VM {vm.record.id}: QEMU still uses the files of {', '.join(held)}; try later")

    async def _tidied(self, vm: Vm) -> _State:
        """Return the state, after removing what interrupted calls have left, as far as QEMU does not use
        it."""
        monitor = await vm.monitor(self._reactor)
        state = await _read(monitor, vm)
        if not state.files and not state.leftovers():
            return state
        rests = [monitor.qmp.execute("remove-fd", fdset_id=number) for number in state.files]
        rests += [monitor.qmp.execute("blockdev-del", node_name=node) for node in state.leftovers()]
        for outcome in await settled(rests):
            if isinstance(outcome, Failure):
                _log.warn(
                    "VM {vm}: a detached disk is not cleaned up for now: {error}",
                    vm=vm.record.id,
                    error=outcome.getErrorMessage(),
                )
        return await _read(monitor, vm)


async def _plug(monitor: VmConnections, disk: ShownDisk, file: int) -> None:
    qmp = monitor.qmp
    number = await qmp.add_file(_FILE + disk.name, file)
    await qmp.execute(
        "blockdev-add",
        driver="file",
        node_name=node_id(disk),
        filename=f"/dev/fdset/{number}",
        read_only=True,
        auto_read_only=False,
        locking="off",
    )
    await qmp.execute("remove-fd", fdset_id=number)  # the node has a descriptor of its own
    await add_device(qmp, disk)


async def add_device(qmp: QmpConnection, disk: ShownDisk) -> None:
    """Plug in a disk whose node is there. :raise InfranetesError: QEMU refuses."""
    await qmp.execute(
        "device_add",
        driver="scsi-hd",
        id=_device_id(disk),
        bus=f"{SCSI}.0",
        scsi_id=disk.target,
        lun=disk.lun,
        drive=node_id(disk),
        serial=disk.name[:_SERIAL],
        device__id=disk.name[:_DEVICE_ID],
    )


async def _read(monitor: VmConnections, vm: Vm) -> _State:
    """Ask QEMU for its state of the VM's disks. :raise Unavailable: it does not answer."""
    try:
        devices = entries(await monitor.qmp.execute("qom-list", path="/machine/peripheral"))
        nodes = entries(await monitor.qmp.execute("query-named-block-nodes", flat=True))
        file_sets = entries(await monitor.qmp.execute("query-fdsets"))
    except InfranetesError as error:
        raise as_unavailable(vm, "does not say which disks it has", error) from error
    return _State(
        {disk.name: disk for disk in shown_disks(devices)},
        frozenset(name for entry in nodes if _NODE.fullmatch(name := str(entry.get("node-name")))),
        [number for entry in file_sets if _is_ours(entry) and isinstance(number := entry["fdset-id"], int)],
    )


def shown_disks(devices: Iterable[Mapping[str, object]]) -> list[ShownDisk]:
    """Return the disks that a VM is shown, among all of its devices as QEMU lists them."""
    matches = (_DEVICE.fullmatch(str(device.get("name"))) for device in devices)
    return [ShownDisk(match[3], *_place(match)) for match in matches if match]


def entries(answer: object) -> list[Mapping[str, object]]:
    """Return the objects of a list in QEMU's answer. A QEMU that was taken over may answer with anything."""
    return [entry for entry in answer if isinstance(entry, dict)] if isinstance(answer, list) else []


def _is_ours(file_set: Mapping[str, object]) -> bool:
    return any(str(file.get("opaque")).startswith(_FILE) for file in entries(file_set.get("fds")))


def _place(match: re.Match[str]) -> tuple[int, int]:
    return int(match[1]), int(match[2])


def _device_id(disk: ShownDisk) -> str:
    return f"shown-{disk.target}-{disk.lun}-{disk.name}"


def node_id(disk: ShownDisk) -> str:
    """Return the name of a disk's node."""
    return f"shown-{disk.target}-{disk.lun}-{disk.name[:_BEGINNING]}"


def _checked(disk: ReadOnlyDisk) -> ReadOnlyDisk:
    if not _NAME.fullmatch(disk.name):
        raise InvalidArgument(f"a disk's name has to be 64 of 0-9 and a-f, not {disk.name[:80]!r}")
    return disk


def _thd_open(disks: Sequence[ReadOnlyDisk]) -> list[int]:
    """Open the disks' files. Blocks. :raise InfranetesError: one can't be a disk; then none stays open."""
    with contextlib.ExitStack() as opened:
        files = []
        for disk in disks:
            files.append(_open(disk.path))
            opened.callback(os.close, files[-1])
            about = os.fstat(files[-1])
            if not stat.S_ISREG(about.st_mode) or not about.st_size or about.st_size % _SECTOR:
                raise FailedPrecondition(
                    f"{disk.path} can't be a disk: it has to be a file of whole sectors of {_SECTOR} bytes, "
                    f"and is of {about.st_size} bytes with mode {stat.filemode(about.st_mode)}"
                )
        opened.pop_all()
    return files


def _thd_note(directory: Path, disks: Sequence[ReadOnlyDisk]) -> None:
    """Note where the files of disks are. Blocks. :raise Unavailable: that can't be written."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        for disk in disks:
            link = directory / disk.name
            if not link.is_symlink() or link.readlink() != disk.path:
                link.unlink(missing_ok=True)
                link.symlink_to(disk.path)
    except OSError as error:
        raise Unavailable(f"{directory}, of the disks that a VM is shown: {error.strerror}") from None


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise ResourceExhausted(f"{path} can't be opened: {error.strerror}; raise LimitNOFILE") from None
        raise FailedPrecondition(f"{path} can't be shown as a disk: {error.strerror}") from None


def as_unavailable(vm: Vm, what: str, error: InfranetesError | Failure) -> Unavailable:
    """Return the error for a caller: what QEMU refuses or leaves unanswered may succeed later."""
    words = error.getErrorMessage() if isinstance(error, Failure) else str(error)
    return Unavailable(f"VM {vm.record.id} {what}: {words}")
