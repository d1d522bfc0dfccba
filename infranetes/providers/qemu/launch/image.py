# SPDX-License-Identifier: Apache-2.0
"""The steps from a record on disk to a VM that is prepared to boot an image. `launcher` undoes them.

step        what it makes                              undone by
files       directory: record, disk, console           `VmRecords.hide`
process     QEMU, its tap, its sockets, its TPM        SIGKILL to all of the VM's user; the tap goes, too
network     the tap's port, the right to send, DHCP    `Uplink.leave`; the port goes with the tap

Then it is READY: it has an address, and executes nothing until `IHypervisor.execute`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import attrs

from infranetes.providers.annotations import read
from infranetes.providers.interface import InstanceSpec
from infranetes.providers.machine_images import BootDisk, DiskFormat, Firmware, ImageBoot
from infranetes.providers.qemu.host.firmware import SWTPM, check_installed, uefi_files
from infranetes.providers.qemu.host.privileges import unprivileged
from infranetes.providers.qemu.launch.clone import StepTimer
from infranetes.providers.qemu.launch.parts import Parts
from infranetes.providers.qemu.network.bridge import open_tap
from infranetes.providers.qemu.program import image_line
from infranetes.providers.qemu.program.command_line import CommandLine
from infranetes.providers.qemu.program.image_line import (
    ROOT,
    ImageDisk,
    ImageFd,
    ImageMachine,
    OpenDisk,
)
from infranetes.providers.qemu.program.open_files import OpenFiles, open_files
from infranetes.providers.qemu.program.process import WatchedProcess, spawn
from infranetes.providers.qemu.program.sockets import CONSOLE, GUEST_AGENT, IDENTITY, QMP
from infranetes.providers.qemu.settings import QemuSettings
from infranetes.providers.qemu.vm import introduction
from infranetes.providers.qemu.vm.paths import VmPaths
from infranetes.providers.qemu.vm.record import CONSOLE as CONSOLE_FILE
from infranetes.providers.qemu.vm.record import DISK, Phase, VmRecord, VmRecords
from infranetes.providers.qemu.vm.sizes import machine_size
from infranetes.providers.qemu.vm.vm import Vm
from infranetes.providers.qemu.volumes.opened import open_volume
from infranetes.providers.volumes import ROOT_SERIAL
from infranetes_common.commands import Command, check, find_program, thd_check
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.identity import AGENT_PORT, Network
from infranetes_common.reactors import IReactor

VARIABLES, TPM = "variables.fd", "tpm"
_SECTOR = 512
_QCOW2_MAGIC = b"QFI\xfb"
_TPM_SOCKET, _TPM_STATE = 3, 4  # swtpm's descriptors


class ImageLaunches:
    """Makes VMs that are prepared to boot images.

    :param line: the node's command line, for its accelerator.
    """

    def __init__(
        self, reactor: IReactor, settings: QemuSettings, records: VmRecords, parts: Parts, line: CommandLine
    ) -> None:
        self._reactor = reactor
        self._settings = settings
        self._records = records
        self._parts = parts
        self._line = line
        self._models: frozenset[str] = frozenset()

    async def validate(self, spec: InstanceSpec, boot: ImageBoot) -> None:
        """Check that this VM can be made.

        :raise InvalidArgument: it can't. :raise FailedPrecondition: not on this node as it is."""
        hardware = boot.hardware
        image_line.check(hardware, self._line.accelerator)
        image_line.check_disks(
            hardware, [disk.serial for disk in boot.disks], boot.base.format is DiskFormat.ISO
        )
        _check_firmware(boot)
        machine_size(self._line, spec.request.size, self._settings)
        most = max(self._settings.max_disk, boot.base.virtual_size)
        if boot.root_bytes > most:
            raise InvalidArgument(
                f"a root disk of {boot.root_bytes >> 20}Mi can't be: {most >> 20}Mi at most "
                "(providers.qemu.max_disk)"
            )
        check_installed(hardware)
        model = image_line.model_of(hardware)
        if model and model not in await self._known_models():
            raise InvalidArgument(
                f"this node's QEMU has no processor model {model!r}; `{self._line.qemu} -cpu help` lists them"
            )

    async def _known_models(self) -> frozenset[str]:
        if not self._models:
            listed = await check(self._reactor, Command([self._line.qemu, "-cpu", "help"], 30.0))
            words = (line.split() for line in listed.decode("utf-8", "replace").splitlines())
            self._models = frozenset(fields[1] for fields in words if len(fields) > 1 and fields[0] == "x86")
        return self._models

    async def prepare(
        self, vm: Vm, spec: InstanceSpec, boot: ImageBoot, ended: Callable[[], None], steps: StepTimer
    ) -> None:
        """Make a reserved VM: it is READY when this returns.

        :raise InfranetesError, OSError: a step failed."""
        address, *more = await self._parts.uplink.addresses(vm)
        vm.record = attrs.evolve(vm.record, address=address, more_addresses=tuple(more))
        network = await self._parts.uplink.guest_network(vm)
        await run_in_thread(self._reactor, self._thd_add, vm.record, boot)
        steps.done("files")
        vm.process = await self._start(vm, spec, boot, network, ended)
        await self._parts.placement.place(vm.record, vm.process.pid)
        steps.done("process")
        monitor = await vm.monitor(self._reactor)
        await monitor.qmp.execute("query-status", self._settings.launch_timeout)
        steps.done("hardware")
        await self._parts.uplink.join(vm)
        await self._parts.uplink.tell(vm, boot.names)
        port = AGENT_PORT if boot.base.has_agent else 0
        vm.record = attrs.evolve(vm.record, phase=Phase.READY, agent_port=port)
        await run_in_thread(self._reactor, self._records.update, vm.record)
        steps.done("network")

    def _thd_add(self, record: VmRecord, boot: ImageBoot) -> None:
        def fill(work: Path) -> None:
            os.close(os.open(work / CONSOLE_FILE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            size = self._root_size(boot)
            if size:
                # The disk below it is named at the start of QEMU alone, so that no path leads to it.
                words = [self._settings.qemu_img, "create", "-q", "-f", "qcow2", str(work / DISK), str(size)]
                thd_check(Command(words, 60.0))
                (work / DISK).chmod(0o600)
            if (uefi := uefi_files(boot.hardware.firmware)) is not None:
                shutil.copyfile(uefi.variables, work / VARIABLES)
                (work / VARIABLES).chmod(0o600)
            if boot.hardware.tpm:
                (work / TPM).mkdir(mode=0o700)
                os.chown(work / TPM, record.uid, record.uid)

        self._records.add_filled(record, fill)

    def _root_size(self, boot: ImageBoot) -> int:
        """Return the bytes of a root disk that goes with its VM; 0: there is none."""
        if boot.root is not None:
            return 0
        if boot.base.format is DiskFormat.ISO:
            size = boot.root_bytes or self._settings.disk
        else:
            size = max(boot.base.virtual_size, boot.root_bytes)
        return -(-size // _SECTOR) * _SECTOR

    async def _start(
        self,
        vm: Vm,
        spec: InstanceSpec,
        boot: ImageBoot,
        network: Network,
        ended: Callable[[], None],
    ) -> WatchedProcess:
        size = machine_size(self._line, spec.request.size, self._settings)
        async with open_files(self._reactor) as files:
            opened = _Opened(files, vm.record, vm.paths)
            await run_in_thread(self._reactor, opened.thd_open, boot)
            if boot.base.has_agent:
                hostname = spec.identity.hostname if read(spec.request.annotations).set_hostname else ""
                # Its network it is told by DHCP, as other images' guests are.
                identity = attrs.evolve(spec.identity, hostname=hostname, network=None)
                await run_in_thread(self._reactor, introduction.keep, identity, vm.paths.sockets)
            machine = ImageMachine(
                hardware=boot.hardware,
                sandbox_id=vm.record.sandbox_id,
                mac=network.mac,
                mtu=network.mtu,
                memory_mib=size.memory_mib,
                cpus=size.cpus,
                disks=opened.disks,
                iso=opened.iso,
                has_agent=boot.base.has_agent,
            )
            if boot.hardware.tpm:
                self._start_tpm(vm.paths, files)
            command = [find_program(self._line.qemu), "-name", vm.record.process_name]
            command += image_line.arguments(self._line, machine)
            child = spawn(
                self._reactor, unprivileged(command, vm.paths.user, dies_with_parent=False), files.by_number()
            )
        return WatchedProcess(self._reactor, child.pid, ended, child)

    def _start_tpm(self, paths: VmPaths, files: OpenFiles) -> None:
        """Start the VM's TPM, which ends when QEMU closes the connection to it."""
        ours, qemus = socket.socketpair()
        with ours, qemus:
            its_files = OpenFiles()
            try:
                its_files.set_standard_streams(paths.output)
                its_files.add(_TPM_SOCKET, os.dup(qemus.fileno()))
                its_files.open(_TPM_STATE, paths.directory / TPM, os.O_RDONLY | os.O_DIRECTORY)
                # The directory's parents are root's: it is entered by its descriptor.
                command = [find_program(SWTPM), "socket", "--tpm2", "--terminate"]
                command += ["--tpmstate", f"dir=/proc/self/fd/{_TPM_STATE},mode=0600"]
                command += ["--ctrl", f"type=unixio,clientfd={_TPM_SOCKET}"]
                spawn(
                    self._reactor,
                    unprivileged(command, paths.user, dies_with_parent=False),
                    its_files.by_number(),
                )
            finally:
                its_files.close()
            files.add(ImageFd.TPM, ours.detach())


class _Opened:
    """The files that one VM's QEMU inherits.

    :ivar disks: those among them, for the command line. :ivar iso: the descriptor of a CD to boot.
    """

    def __init__(self, files: OpenFiles, record: VmRecord, paths: VmPaths) -> None:
        self.disks: list[ImageDisk] = []
        self.iso: int | None = None
        self._files = files
        self._record = record
        self._paths = paths
        self._next = int(ImageFd.DISKS)

    def thd_open(self, boot: ImageBoot) -> None:
        """Open them. A tap waits in the kernel until no other network is being changed."""
        files, paths = self._files, self._paths
        shutil.rmtree(paths.sockets, ignore_errors=True)
        paths.sockets.mkdir(mode=0o700)
        files.set_standard_streams(paths.output)
        files.open(ImageFd.LOG, paths.console, os.O_WRONLY | os.O_APPEND)
        listening = [(ImageFd.QMP, QMP), (ImageFd.CONSOLE, CONSOLE), (ImageFd.GUEST_AGENT, GUEST_AGENT)]
        if boot.base.has_agent:
            listening.append((ImageFd.IDENTITY, IDENTITY))
        for channel, name in listening:
            files.listen(channel, paths.sockets / name)
        if (uefi := uefi_files(boot.hardware.firmware)) is not None:
            files.open(ImageFd.FIRMWARE, uefi.code)
            files.open(ImageFd.VARIABLES, paths.directory / VARIABLES, os.O_RDWR)
        self._root(boot)
        for number, disk in enumerate(boot.disks):
            self.disks.append(
                ImageDisk(f"disk{number}", disk.serial, self._kept(disk), read_only=disk.read_only)
            )
        if boot.base.format is DiskFormat.ISO:
            self.iso = self._base(boot)
        files.add(ImageFd.TAP, open_tap(self._record.tap))

    def _root(self, boot: ImageBoot) -> None:
        if boot.root is not None:
            top = self._kept(boot.root)
            size = _size_of(self._files.by_number()[top.fd], top)
            if boot.base.format is not DiskFormat.ISO and size < boot.base.virtual_size:
                raise FailedPrecondition(
                    f"the volume for the root disk has {size >> 20} MiB, and the image "
                    f"{boot.base.virtual_size >> 20} MiB: ask for a larger one"
                )
            self.disks.append(ImageDisk(ROOT, ROOT_SERIAL, top))
            return
        fd = self._number()
        self._files.open(fd, self._paths.disk, os.O_RDWR)
        base = None
        if boot.base.format is not DiskFormat.ISO:
            base = OpenDisk(self._base(boot), boot.base.format)
        self.disks.append(ImageDisk(ROOT, ROOT_SERIAL, OpenDisk(fd, DiskFormat.QCOW2), base, kept=False))

    def _base(self, boot: ImageBoot) -> int:
        fd, path = self._number(), boot.base.path
        try:
            self._files.open(fd, path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise FailedPrecondition(
                f"the image's disk {path} can't be opened: {error.strerror}; pull the image again"
            ) from error
        if not stat.S_ISREG(os.fstat(self._files.by_number()[fd]).st_mode):
            raise FailedPrecondition(f"the image's disk {path} is no regular file")
        return fd

    def _kept(self, disk: BootDisk) -> OpenDisk:
        """Open a disk that outlives the VM; no second one gets it meanwhile."""
        fd = self._number()
        if disk.format is DiskFormat.QCOW2:
            self._files.add(fd, _locked(disk))
            return OpenDisk(fd, DiskFormat.QCOW2)
        file = open_volume(disk.volume or disk.serial, disk.path, disk.read_only)
        self._files.add(fd, file.descriptor)
        is_device = stat.S_ISBLK(os.fstat(file.descriptor).st_mode)
        return OpenDisk(fd, DiskFormat.RAW, is_device, file.direct)

    def _number(self) -> int:
        self._next += 1
        return self._next - 1


def _locked(disk: BootDisk) -> int:
    mode = os.O_RDONLY if disk.read_only else os.O_RDWR
    try:
        descriptor = os.open(disk.path, mode | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise FailedPrecondition(f"the disk {disk.path} can't be opened: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno != errno.EWOULDBLOCK:
            raise
        raise FailedPrecondition(f"another VM has the disk {disk.path}: wait until it is gone") from None
    return descriptor


def _size_of(descriptor: int, disk: OpenDisk) -> int:
    """Return the size that a guest sees of an open disk."""
    if disk.format is DiskFormat.RAW:
        return os.lseek(descriptor, 0, os.SEEK_END)
    header = os.pread(descriptor, 32, 0)
    if len(header) < 32 or not header.startswith(_QCOW2_MAGIC):
        raise FailedPrecondition("the volume for the root disk is no disk of the format qcow2")
    return int.from_bytes(header[24:32], "big")


def _check_firmware(boot: ImageBoot) -> None:
    """Check the firmware, as far as the image tells what boots it. :raise InvalidArgument: it does not."""
    base, firmware = boot.base, boot.hardware.firmware
    if base.boots_by_bios == base.boots_by_uefi:
        return
    if firmware is Firmware.BIOS and base.boots_by_uefi:
        raise InvalidArgument(
            f"the image boots by UEFI only, and the VM would have {firmware.value}: ask for uefi"
        )
    if firmware is not Firmware.BIOS and base.boots_by_bios:
        raise InvalidArgument(
            f"the image boots by BIOS only, and the VM would have {firmware.value}: ask for bios"
        )
