# SPDX-License-Identifier: Apache-2.0
"""QEMUs with memory and a disk of layers, and without a guest, that are kept and started again."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase
from zope.interface import implementer

from infranetes.guest.image import GuestImage
from infranetes.providers.keeping import IStartsKeptVms, KeptVm
from infranetes.providers.qemu.host.privileges import QemuUser
from infranetes.providers.qemu.host.uids import UidChoice, parse
from infranetes.providers.qemu.keep import preparer
from infranetes.providers.qemu.keep.hardware import add_plugged
from infranetes.providers.qemu.keep.keeper import Keeper
from infranetes.providers.qemu.keep.preparer import Preparer
from infranetes.providers.qemu.keep.state import thd_read
from infranetes.providers.qemu.program.command_line import CommandLine, Fd
from infranetes.providers.qemu.program.memory import Memory
from infranetes.providers.qemu.program.open_files import OpenFiles
from infranetes.providers.qemu.program.process import WatchedProcess
from infranetes.providers.qemu.program.sockets import QMP
from infranetes.providers.qemu.settings import QemuSettings
from infranetes.providers.qemu.template.ram import SharedRam
from infranetes.providers.qemu.template.template import DISK, STATE, Template
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes.providers.qemu.vm.disks import Disks, entries
from infranetes.providers.qemu.vm.paths import VmPaths
from infranetes.providers.qemu.vm.record import Phase, VmRecord
from infranetes.providers.qemu.vm.vm import Vm
from infranetes_common.concurrency import sleep, start
from infranetes_common.errors import NotFound, Unavailable
from infranetes_common.reactors import installed
from tests.support import numbered_files

reactor = installed()
QEMU, QEMU_IMG = "/usr/bin/qemu-system-x86_64", "/usr/bin/qemu-img"
DISK_MIB = 64
_LINE = CommandLine(QEMU, "QEMU", "tcg", 64, 64, 1, disk_mib=DISK_MIB, code_mib=8)

if TYPE_CHECKING:
    _Base = TestCase
else:
    _Base = object


@implementer(IStartsKeptVms)
class Keeping:
    """Keeps given VMs with the provider's own keeper and preparer.

    :param place: has a directory for sockets. :ivar volumes: that each VM has, in name only.
    :ivar room: of each VM's pod. :ivar template: see `KeepCase`."""

    def __init__(self, vms: Mapping[str, Vm], template: Template, place: Path) -> None:
        self.vms = dict(vms)
        self.template = template
        self.uids = UidChoice(reactor, parse(QemuSettings().uids), lambda: ())
        self.preparer = Preparer(reactor, QemuSettings(), place / "run", self.uids)
        self.volumes: frozenset[str] = frozenset()
        self.room: int | None = None
        self.keeper = Keeper(reactor, QEMU_IMG, self._unchanged, lambda record: self.room)

    @asynccontextmanager
    async def _unchanged(self, vm: Vm) -> AsyncIterator[frozenset[str]]:
        yield self.volumes

    def keep(self, instance_id: str, directory: Path, seconds: float) -> Deferred[KeptVm]:
        return start(self._keep(instance_id, directory, seconds))

    def prepare(self, directory: Path, seconds: float) -> Deferred[None]:
        return start(self.preparer.prepare(directory, self.template, seconds))

    def check(self, directory: Path) -> Deferred[None]:
        return start(self._check(directory))

    async def _check(self, directory: Path) -> None:
        thd_read(directory, self.template)

    async def _keep(self, instance_id: str, directory: Path, seconds: float) -> KeptVm:
        if instance_id not in self.vms:
            raise NotFound(f"there is no VM {instance_id}")
        return await self.keeper.keep(self.vms[instance_id], directory, seconds)


class KeepCase(_Base):
    """Make QEMUs that can be kept. :ivar processes: of each instance. :ivar memory: likewise.

    :ivar template: their disks are layers of its."""

    def setUp(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="infranetes-"))
        self.addCleanup(shutil.rmtree, self.place)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.memory: dict[str, Memory] = {}
        self.ram = SharedRam(reactor)
        (self.place / "run").mkdir()
        self.template = self._make_template()
        arguments = CommandLine.loader_arguments
        self.patch(CommandLine, "loader_arguments", lambda line, disk: _without_ports(arguments(line, disk)))
        self.patch(preparer, "open_tap", lambda name: os.open(os.devnull, os.O_RDWR))

    def _make_template(self) -> Template:
        image = GuestImage(self.place / "image", "an image", 0.0, "bookworm", "6.1", ())
        template = Template(self.place / ("0" * 24), _LINE, image)
        for directory in (image.directory, template.directory):
            directory.mkdir()
        image.disk.write_bytes(bytes(1 << 20))
        for file in (image.kernel, image.initrd, template.ram, template.directory / STATE):
            file.touch()
        disk = str(template.directory / DISK)
        for path, below, kind in ((disk, str(image.disk), "raw"), (str(template.overlay), disk, "qcow2")):
            _qemu_img("create", "-q", "-f", "qcow2", "-F", kind, "-b", below, path, f"{DISK_MIB}M")
        template.seal(template.directory)
        return template

    def keeping(self, vms: Mapping[str, Vm]) -> Keeping:
        """Return what keeps these VMs."""
        return Keeping(vms, self.template, self.place)

    def record(self) -> VmRecord:
        """Return the record of a new VM."""
        return VmRecord(
            secrets.token_hex(16),
            "sandbox",
            "cluster",
            "node",
            "10.0.0.2",
            1.0,
            phase=Phase.READY,
            template=self.template.directory.name,
            template_made_at=self.template.made_at(),
            image=self.template.image.key,
        )

    def _vm_of(self, record: VmRecord, disk: Path) -> Vm:
        """Return the VM of a record, which has its files. :param disk: that its own is a copy of."""
        paths = VmPaths(self.place / record.token, self.place / f"s-{record.token}", QemuUser(0, 0))
        paths.directory.mkdir()
        paths.sockets.mkdir()
        shutil.copyfile(disk, paths.disk)
        return Vm(record, paths)

    def vm(self, disk: Path | None = None, more: Sequence[str] = ()) -> Vm:
        """Return a running VM with the hardware of a clone, as far as that matters here.

        :param disk: a copy of this is its disk; None: an empty one is. :param more: arguments of QEMU."""
        vm = self._vm_of(self.record(), disk or self.template.overlay)
        memory = os.memfd_create("ram")
        os.truncate(memory, _LINE.memory_mib << 20)
        os.pwrite(memory, os.urandom(8 << 20), 16 << 20)
        self.memory[vm.record.id] = Memory(memory)
        with contextlib.closing(OpenFiles()) as files:
            files.add(Fd.RAM, os.dup(memory))
            self.template.open_disks(files)
            self._start(vm, files, [*self._running_arguments(), *more])
        return vm

    def _running_arguments(self) -> list[str]:
        """Return a clone's arguments, but for those by which it waits for a state."""
        return [each for each in _LINE.clone_arguments() if each not in ("-S", "-incoming", "defer")]

    async def started_from(self, directory: Path) -> Vm:
        """Start a VM from a kept one, and wait until it executes."""
        origin = thd_read(directory, self.template)
        vm = self._vm_of(attrs.evolve(self.record(), kept=str(directory)), origin.overlay)
        vm.ram = self.memory[vm.record.id] = await self.ram.of(origin.ram)
        with contextlib.closing(OpenFiles()) as files:
            files.add(Fd.RAM, os.dup(vm.ram.fileno()))
            origin.open_for_clone(files)
            self._start(vm, files, origin.clone_arguments())
        vm.connections = VmConnections(reactor)
        await vm.connections.open_monitor(vm.paths.sockets)
        await add_plugged(vm.connections.qmp, origin.hardware, _LINE)
        await Disks(reactor).show_as_kept(vm, origin.disks)
        await vm.connections.load_state(30.0)
        await vm.connections.qmp.execute("cont")
        return vm

    async def loaded(self, memory: Path, disk: Path) -> str:
        """Return how the loading of a kept VM's memory into another QEMU ends: completed, or failed."""
        vm = self.vm(disk, ("-S", "-incoming", "defer"))
        qmp = (await vm.monitor(reactor)).qmp
        await qmp.execute("query-status")
        file = os.open(memory, os.O_RDONLY)
        try:
            await qmp.pass_file("memory", file)
        finally:
            os.close(file)
        try:
            await qmp.execute("migrate-incoming", uri="fd:memory")
            while True:
                status = (await qmp.execute("query-migrate")).get("status")
                if status in ("completed", "failed"):
                    return str(status)
                await sleep(reactor, 0.02)
        except Unavailable:
            return "failed"  # QEMU has ended

    def _start(self, vm: Vm, files: OpenFiles, words: Sequence[str]) -> None:
        """Start its QEMU with these files and its own."""
        files.open(Fd.DISK, vm.paths.disk, os.O_RDWR)
        files.listen(Fd.QMP, vm.paths.sockets / QMP)
        command = [QEMU, "-name", vm.record.process_name, *_without_ports(words)]
        with vm.paths.output.open("wb") as output:
            process = numbered_files.popen(command, files.by_number(), output)
        self.processes[vm.record.id] = process
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        self.watch_process(vm)

    def watch_process(self, vm: Vm) -> None:
        """Have a daemon notice when the VM's process ends."""
        vm.process = WatchedProcess(reactor, self.processes[vm.record.id].pid, vm.changes.notify)
        self.addCleanup(vm.detach)

    def found_again(self, vm: Vm) -> Vm:
        """Return the VM as the next daemon finds it."""
        vm.detach()
        found = Vm(vm.record, vm.paths)
        self.watch_process(found)
        return found

    async def killed(self, vm: Vm) -> None:
        """Kill the VM's QEMU, and wait until the daemon has noticed."""
        changed = vm.changes.wait()
        self.processes[vm.record.id].kill()
        await changed

    async def write(self, vm: Vm, what: str) -> None:
        """Write to the VM's disk as its guest would. :param what: such as "-P 7 1M 64k"."""
        monitor = await vm.monitor(reactor)
        devices = await monitor.qmp.execute("query-block")
        [device] = [each["qdev"] for each in devices if each.get("inserted")]
        for command in (f"write {what}", "flush"):
            line = f'qemu-io -d {device} "{command}"'
            said = await monitor.qmp.execute("human-monitor-command", command_line=line)
            self.assertEqual(said, "")  # what it says of a success is in QEMU's output

    async def assert_as_before(self, vm: Vm) -> None:
        """Assert that the VM executes with one layer of its own, and QEMU and the directory have no more."""
        qmp = (await vm.monitor(reactor)).qmp
        self.assertEqual((await qmp.execute("query-status"))["status"], "running")
        nodes = entries(await qmp.execute("query-named-block-nodes", flat=True))
        own = [each for each in nodes if each["node-name"] in ("disk", "keep")]
        self.assertEqual([(each["node-name"], each["ro"]) for each in own], [("disk", False)])
        sets = entries(await qmp.execute("query-fdsets"))
        self.assertEqual([each for each in sets if each["fdset-id"] != Fd.KEPT_DISK], [])
        self.assertEqual(await qmp.execute("query-jobs"), [])
        self.assertEqual([each.name for each in vm.paths.directory.glob("keep*")], [])
        files = [each for each in self.open_files(vm) if each.startswith((str(self.place), "pipe:"))]
        self.assertEqual([each for each in files if "keep" in each or "pipe:" in each], [])

    def open_files(self, vm: Vm) -> list[str]:
        """Return the paths of the files that a VM's QEMU has open."""
        process = self.processes[vm.record.id]
        return [os.readlink(each) for each in Path(f"/proc/{process.pid}/fd").iterdir()]


def reads(disk: Path, what: str, shared: bool = False) -> bool:
    """Return whether a disk has what is meant.

    :param what: such as "-P 7 1M 64k". :param shared: whether a QEMU uses it."""
    options = ["-U"] if shared else []
    source = f"driver=qcow2,backing=,file.driver=file,file.filename={disk}"
    command = ["qemu-io", "-r", *options, "--image-opts", "-c", f"read {what}", source]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return "read 65536/65536" in said and "failed" not in said


def _qemu_img(*words: str) -> None:
    subprocess.run([QEMU_IMG, *words], check=True)


def _without_ports(words: Sequence[str]) -> list[str]:
    """Return QEMU's arguments without those of what leads to a network, a console or an agent."""
    left: list[str] = []
    for word in words:
        if any(name in word for name in ("console", "identity", "agent", "net0")):
            left.pop()  # the option's name
        else:
            left.append(word)
    return left
