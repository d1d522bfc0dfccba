# SPDX-License-Identifier: Apache-2.0
"""Makes what was kept of a VM the state that others start from.

Clones share memory that is in a file, and `keep` has it in a stream. So the stream is loaded once into a QEMU
that executes nothing, whose memory is a file. Then its devices are saved without the memory, as a template's.

step       makes                                       when it was interrupted
tidy       (removes what an earlier attempt has left)
sockets    keep-NAME in the run directory              the next daemon's start ends QEMU, and removes it
process    QEMU, with NAME in its arguments            it ends with the daemon
load       ram                                         the next attempt begins with `tidy`
save       state
files      layers, overlay
seal       manifest                                    nothing is left to do
memory     (removes the stream)                        the next attempt removes it

What was kept is as hostile as the guest: QEMU gets it as a user of its own and without rights, like a VM's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from pathlib import Path
from threading import Event

from twisted.internet.defer import CancelledError, DeferredSemaphore
from twisted.internet.interfaces import ITransport
from twisted.logger import Logger

from infranetes.providers.interface import ShownDisk
from infranetes.providers.qemu.host import uids
from infranetes.providers.qemu.host.privileges import QemuUser, unprivileged
from infranetes.providers.qemu.host.uids import UidChoice
from infranetes.providers.qemu.keep.hardware import Disk, Hardware, add_plugged
from infranetes.providers.qemu.keep.layer import thd_remove
from infranetes.providers.qemu.keep.pipe import as_error
from infranetes.providers.qemu.keep.state import (
    MANIFEST,
    MEMORY,
    check_fits,
    layer_file,
    thd_kept,
    thd_read,
    thd_seal,
)
from infranetes.providers.qemu.network.bridge import open_tap
from infranetes.providers.qemu.program.command_line import Fd
from infranetes.providers.qemu.program.open_files import OpenFiles, open_files
from infranetes.providers.qemu.program.process import WatchedProcess, pids_by_argument, spawn
from infranetes.providers.qemu.program.sockets import AGENT, IDENTITY, QMP, connect_silently
from infranetes.providers.qemu.settings import MIB, QemuSettings
from infranetes.providers.qemu.template.save import save_state
from infranetes.providers.qemu.template.template import OVERLAY, RAM, STATE, Template
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes.providers.qemu.vm.consoles import tail
from infranetes.providers.qemu.vm.disks import add_device, node_id
from infranetes.providers.qemu.volumes import sparse_files
from infranetes_common.commands import Command, check, find_program
from infranetes_common.concurrency import (
    KEEPING,
    Flight,
    KeyedLock,
    run_in_thread,
    settled,
    start,
    to_its_end,
    within,
)
from infranetes_common.errors import FailedPrecondition, InfranetesError, ResourceExhausted, Unavailable
from infranetes_common.reactors import IReactor

_SOCKETS = "keep-"  # the beginning of the names of their directories
_PROCESS_NAME = "guest=infranetes-keep-"
_OUTPUT = "qemu.log"
_SPARE = 64 * MIB  # for devices, the overlay and the manifest
_KILL_SECONDS = 10.0
_CREATE_SECONDS = 30.0
_AT_ONCE = 2
_log = Logger()


class Preparer:
    """Prepares kept VMs; calls for one directory are served one after the other.

    :param run: the directory for sockets.
    """

    def __init__(self, reactor: IReactor, settings: QemuSettings, run: Path, uid_choice: UidChoice) -> None:
        self._reactor = reactor
        self._settings = settings
        self._run = run
        self._uids = uid_choice
        self._directories_in_work: KeyedLock[Path] = KeyedLock()
        self._places = DeferredSemaphore(_AT_ONCE)
        self._under_way: list[Flight[None]] = []

    async def end_leftovers(self) -> None:
        """End the QEMUs that killed daemons have left, and remove their sockets. Called before any other."""
        directories = await run_in_thread(self._reactor, lambda: list(self._run.glob(f"{_SOCKETS}*")))
        names = [_process_name(sockets) for sockets in directories]
        processes = await run_in_thread(self._reactor, pids_by_argument, names)
        for pid in (pid for pids in processes.values() for pid in pids):
            with contextlib.suppress(ProcessLookupError):
                await self._kill(WatchedProcess(self._reactor, pid, lambda: None))
        for sockets in directories:
            await run_in_thread(self._reactor, shutil.rmtree, sockets, True)

    async def prepare(self, directory: Path, template: Template, seconds: float) -> None:
        """See `IStartsKeptVms`. :param template: the one that VMs are clones of now."""
        work = within(
            self._reactor, seconds, self._in_turn(directory, template), f"preparing the VM in {directory}"
        )
        flight = Flight(work)
        self._under_way.append(flight)
        try:
            await flight.join()
        except CancelledError:
            if flight.done:
                raise Unavailable(f"the VM in {directory} is not prepared: the daemon stops") from None
            flight.cancel()
            await settled([flight.join()])  # nobody writes to the directory any more
            raise
        finally:
            self._under_way.remove(flight)

    async def stop(self) -> None:
        """End what is under way."""
        flights = (*self._under_way,)  # one that is cancelled may be over at once
        for flight in flights:
            flight.cancel()
        await settled([flight.join() for flight in flights])

    async def _in_turn(self, directory: Path, template: Template) -> None:
        async with self._directories_in_work.held(directory), self._places:
            hardware = await run_in_thread(self._reactor, thd_kept, directory)
            if await run_in_thread(self._reactor, (directory / MANIFEST).exists):
                await run_in_thread(self._reactor, thd_read, directory, template)
            else:
                began = self._reactor.seconds()
                await run_in_thread(self._reactor, _thd_tidy, directory, hardware, template)
                await self._prepare(directory, hardware, template)
                _log.info(
                    "the VM that was kept in {directory} is what others start from, after {seconds:.1f} s",
                    directory=str(directory),
                    seconds=self._reactor.seconds() - began,
                )
            await run_in_thread(self._reactor, thd_remove, directory / MEMORY)

    async def _prepare(self, directory: Path, hardware: Hardware, template: Template) -> None:
        sockets = self._run / f"{_SOCKETS}{secrets.token_hex(8)}"
        uid = await self._uids.lend()
        try:
            await run_in_thread(self._reactor, sockets.mkdir, 0o700)
            await self._load(directory, hardware, template, sockets, uid)
            await self._add_files(directory, hardware)
            await run_in_thread(self._reactor, _thd_sealed, directory, hardware, purpose=KEEPING)
        finally:
            self._uids.give_back(uid)
            await run_in_thread(self._reactor, shutil.rmtree, sockets, True)

    async def _load(
        self, directory: Path, hardware: Hardware, template: Template, sockets: Path, uid: int
    ) -> None:
        """Load the state into a QEMU, and save it without the memory."""
        process: WatchedProcess | None = None
        try:
            process = await self._start(directory, hardware, template, sockets, uid)
            await self._load_and_save(directory, hardware, template, sockets)
        except (InfranetesError, OSError) as error:
            if isinstance(error, OSError):
                raise as_error(error, f"the VM in {directory} can't be prepared") from None
            last = await run_in_thread(self._reactor, tail, sockets / _OUTPUT)
            full = await run_in_thread(self._reactor, _is_full, directory)
            kind = ResourceExhausted if full else type(error)
            why = "the disk is full, make room; " if full else ""
            quoted = f"; QEMU's last output: {last}" if last else ""
            raise kind(f"the VM in {directory} can't be prepared: {why}{error}{quoted}") from error
        finally:
            if process is not None:
                await to_its_end(start(self._end(process, uid)))  # nobody writes to the files any more

    async def _end(self, process: WatchedProcess, uid: int) -> None:
        await self._kill(process)
        await run_in_thread(self._reactor, uids.kill_processes, uid)

    async def _kill(self, process: WatchedProcess) -> None:
        what = f"the end of QEMU's process {process.pid} after SIGKILL"
        await within(self._reactor, _KILL_SECONDS, process.kill(), what)

    async def _start(
        self, directory: Path, hardware: Hardware, template: Template, sockets: Path, uid: int
    ) -> WatchedProcess:
        async with open_files(self._reactor) as files:
            await run_in_thread(self._reactor, _thd_open, files, directory, hardware, template, sockets, uid)
            line = template.command_line
            most = hardware.memory + _SPARE  # of each file, so that it can't fill the disk
            command = ["prlimit", f"--fsize={most}", find_program(line.qemu), "-name", _process_name(sockets)]
            command += line.loader_arguments(hardware.disk)
            user = QemuUser(uid, uid)
            child = spawn(
                self._reactor, unprivileged(command, user, dies_with_parent=True), files.by_number()
            )
        return WatchedProcess(self._reactor, child.pid, lambda: None, child)

    async def _load_and_save(
        self, directory: Path, hardware: Hardware, template: Template, sockets: Path
    ) -> None:
        connections = VmConnections(self._reactor)
        agent: ITransport | None = None
        try:
            await connections.open_monitor(sockets)
            # The kept VM's agent was called. Clones' agents are not until later, and have to learn of that.
            agent = await connect_silently(self._reactor, sockets / AGENT)
            await add_plugged(connections.qmp, hardware, template.command_line)
            for disk in hardware.disks:
                await _add_empty(connections, disk)
            await connections.load_state(self._settings.template_timeout, memory=True)
            await save_state(self._reactor, connections.qmp, directory / STATE)
        finally:
            connections.close()
            if agent is not None:
                agent.loseConnection()

    async def _add_files(self, directory: Path, hardware: Hardware) -> None:
        unwanted = Event()
        await run_in_thread(
            self._reactor, thd_link, directory, hardware, unwanted, on_cancel=unwanted.set, purpose=KEEPING
        )
        words = [self._settings.qemu_img, "create", "-q", "-f", "qcow2"]
        await check(
            self._reactor, Command([*words, str(directory / OVERLAY), str(hardware.disk)], _CREATE_SECONDS)
        )


async def _add_empty(connections: VmConnections, disk: Disk) -> None:
    """Plug in a disk in the place of one that the VM was shown: nothing is read of it."""
    shown = ShownDisk(disk.name, disk.target, disk.lun)
    await connections.qmp.execute("blockdev-add", driver="null-co", node_name=node_id(shown), size=disk.size)
    await add_device(connections.qmp, shown)


def _process_name(sockets: Path) -> str:
    """Return the argument by which the QEMU is found that has its sockets there."""
    return f"{_PROCESS_NAME}{sockets.name.removeprefix(_SOCKETS)}"


def _thd_tidy(directory: Path, hardware: Hardware, template: Template) -> None:
    """Check that the VM can be prepared, and remove what an earlier attempt has left of it."""
    check_fits(directory, hardware, template)
    memory = directory / MEMORY
    if not memory.is_file():
        raise FailedPrecondition(f"{memory} is missing: keep the VM again")
    if unknown := [disk.name for disk in hardware.disks if not disk.path]:
        raise FailedPrecondition(
            f"the VM in {directory} was shown {len(unknown)} disks by an earlier release, which did not note "
            "their files: recreate the pod, and keep that"
        )
    for name in (RAM, STATE, OVERLAY):
        (directory / name).unlink(missing_ok=True)
    needed, free = memory.stat().st_size + _SPARE, shutil.disk_usage(directory).free
    if free < needed:
        raise ResourceExhausted(
            f"{directory} has {free // MIB} MiB free, and preparing a kept VM takes up to "
            f"{needed // MIB} MiB: make room"
        )


def _thd_open(
    files: OpenFiles, directory: Path, hardware: Hardware, template: Template, sockets: Path, uid: int
) -> None:
    ram = directory / RAM
    ram.touch(0o600)
    os.truncate(ram, hardware.memory_mib * MIB)
    os.chown(ram, uid, uid)  # QEMU opens it again
    files.set_standard_streams(sockets / _OUTPUT)
    files.open(Fd.RAM, ram, os.O_RDWR)
    files.open(Fd.STATE, directory / MEMORY)
    files.open(Fd.CONSOLE, Path(os.devnull), os.O_RDWR)
    template.open_image_files(files)
    files.listen(Fd.QMP, sockets / QMP)
    files.listen(Fd.IDENTITY, sockets / IDENTITY)
    files.listen(Fd.AGENT, sockets / AGENT)
    files.add(Fd.TAP, open_tap(f"infk{secrets.token_hex(5)}"))


def thd_link(directory: Path, hardware: Hardware, unwanted: Event) -> None:
    """Have the files of the disks that the VM was shown, so that nothing else has to. Blocks.

    :param unwanted: ends it. :raise InfranetesError: one can't be had."""
    for disk in hardware.disks:
        source, target = Path(disk.path), layer_file(directory, disk)
        if source == target:
            continue
        target.unlink(missing_ok=True)
        try:
            if source.lstat().st_size != disk.size:
                raise FailedPrecondition(f"{source} is not the file that the kept VM was shown")
            try:
                os.link(source, target, follow_symlinks=False)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EMLINK):
                    raise
                with source.open("rb") as old, target.open("xb") as new:
                    sparse_files.copy(old.fileno(), new.fileno(), unwanted)
        except FileNotFoundError:
            raise FailedPrecondition(
                f"{source}, which the kept VM was shown, is gone with its image: keep a VM that runs now"
            ) from None
        except OSError as error:
            raise as_error(error, f"{source} can't be had in {directory}") from None


def _thd_sealed(directory: Path, hardware: Hardware) -> None:
    try:
        thd_seal(directory, hardware)
    except OSError as error:
        raise as_error(error, f"the VM in {directory} can't be prepared") from None


def _is_full(directory: Path) -> bool:
    return shutil.disk_usage(directory).free < MIB
