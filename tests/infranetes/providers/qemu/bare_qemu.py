# SPDX-License-Identifier: Apache-2.0
"""QEMUs without a guest, for tests of the commands that their monitors get."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from twisted.trial.unittest import TestCase

from infranetes.providers.qemu.host.privileges import QemuUser
from infranetes.providers.qemu.program.command_line import SANDBOX, SCSI
from infranetes.providers.qemu.program.process import WatchedProcess
from infranetes.providers.qemu.program.sockets import QMP
from infranetes.providers.qemu.vm.paths import VmPaths
from infranetes.providers.qemu.vm.record import Phase, VmRecord, instance_id
from infranetes.providers.qemu.vm.vm import Vm
from infranetes_common.reactors import installed

reactor = installed()
QEMU = "/usr/bin/qemu-system-x86_64"

if TYPE_CHECKING:
    _Base = TestCase
else:
    _Base = object


class BareQemuCase(_Base):
    """Make QEMUs. :ivar processes: their processes, by the instance."""

    def setUp(self) -> None:
        self.sockets = Path(tempfile.mkdtemp(prefix="infranetes-"))
        self.addCleanup(shutil.rmtree, self.sockets)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def bare_vm(self) -> Vm:
        """Return a running VM, on a QEMU of its own."""
        token = secrets.token_hex(16)
        directory = self.sockets / token
        directory.mkdir()
        listener = socket.socket(socket.AF_UNIX)
        with listener:
            listener.bind(str(directory / QMP))
            listener.listen()
            process = subprocess.Popen(
                [
                    *(QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-m", "32"),
                    *("-machine", "q35,accel=tcg", "-sandbox", SANDBOX),
                    *("-device", f"virtio-scsi-pci,id={SCSI},num_queues=2,hotplug=off"),
                    *("-chardev", f"socket,id=qmp,fd={listener.fileno()},server=on,wait=off"),
                    *("-mon", "chardev=qmp,mode=control"),
                ],
                pass_fds=[listener.fileno()],
            )
        self.processes[instance_id(token)] = process
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        record = VmRecord(token, "sandbox", "cluster", "node", "10.0.0.2", 1.0, phase=Phase.READY)
        files = self.sockets / f"{record.token}-files"
        files.mkdir(exist_ok=True)
        vm = Vm(record, VmPaths(files, directory, QemuUser(0, 0)))
        self.watch_process(vm)
        return vm

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

    def open_files(self, machine: str) -> list[str]:
        """Return the paths of the files that a VM's QEMU has open, one for each descriptor."""
        process = self.processes[machine]
        if process.poll() is not None:
            return []
        return [os.readlink(each) for each in Path(f"/proc/{process.pid}/fd").iterdir()]
