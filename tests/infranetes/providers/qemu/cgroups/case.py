# SPDX-License-Identifier: Apache-2.0
"""Processes to be put into control groups: those of this machine, and those of a real systemd."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Mapping
from pathlib import Path

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes.providers.cgroup_parents import group_path
from infranetes.providers.qemu.cgroups import cgroupfs
from infranetes.providers.qemu.cgroups.cgroupfs import CgroupFiles, hierarchies, memberships
from infranetes.providers.qemu.cgroups.scopes import SystemdScopes
from infranetes_common.errors import InfranetesError
from infranetes_common.reactors import installed
from infranetes_common.systemd_bus import Bus
from tests.harness.needs import needs_root, needs_systemd
from tests.support.systemd import Inside, Systemd, shared

reactor = installed()


async def refused(kind: type[InfranetesError], work: Awaitable[object]) -> str:
    """Return the message of the error with which `work` fails."""
    try:
        await work
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


@needs_root
class Processes(TestCase):
    """Tests with sleeping processes."""

    def sleeping(self, *before: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([*before, "sleep", "600"], stdin=subprocess.DEVNULL)
        self.addCleanup(self._end, process)
        return process

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()


class CgroupCase(Processes):
    """This machine's groups, with one for a pod."""

    def setUp(self) -> None:
        self.parent = f"infranetes-tests-qemu-{os.getpid()}/pod-{secrets.token_hex(4)}"
        self.name = f"infranetes-{secrets.token_hex(16)}"
        self.groups = CgroupFiles(reactor)
        for hierarchy in hierarchies():
            if self.is_kubelets(hierarchy):
                (hierarchy.mount / self.parent).mkdir(parents=True)
                self.hand_down(hierarchy)
        self.addCleanup(self.remove)

    @staticmethod
    def is_kubelets(hierarchy: cgroupfs.Hierarchy) -> bool:
        """Return whether kubelet would make a pod's group there."""
        return hierarchy.has("memory") or hierarchy.name not in (cgroupfs.UNIFIED, "name=systemd")

    def hand_down(self, hierarchy: cgroupfs.Hierarchy) -> None:
        """Enable the controllers for children, as kubelet does, so that groups have all of the machine's."""
        top = hierarchy.mount
        for directory in (top, top / Path(self.parent).parent):
            if hierarchy.name == cgroupfs.UNIFIED:
                with contextlib.suppress(OSError):
                    (directory / "cgroup.subtree_control").write_text("+memory +cpu +pids")
        if hierarchy.has("cpuset") and hierarchy.name != cgroupfs.UNIFIED:
            for directory in (top / Path(self.parent).parent, top / self.parent):
                for file in ("cpuset.cpus", "cpuset.mems"):
                    (directory / file).write_text((directory.parent / file).read_text())

    def remove(self) -> None:
        for hierarchy in hierarchies():
            for below in (Path(self.parent) / self.name, Path(self.parent), Path(self.parent).parent):
                with contextlib.suppress(OSError):
                    (hierarchy.mount / below).rmdir()

    def where(self, pid: int) -> set[str]:
        """Return the groups of the process, in the hierarchies that have the parent."""
        found = memberships(pid)
        return {found[each.name] for each in hierarchies() if self.is_kubelets(each)}

    def left(self) -> list[Path]:
        return [path for _, path in self.groups.directories(self.parent, self.name) if path.exists()]

    def limit_pod(self, size: int) -> Path:
        """Limit the pod's memory. Return the group in which that of its VM is counted."""
        directory = cgroupfs.memory_directory(group_path(self.parent), self.name)
        assert directory is not None
        file = "memory.max" if (directory.parent / "memory.max").exists() else "memory.limit_in_bytes"
        (directory.parent / file).write_text(str(size))
        with contextlib.suppress(OSError):  # version 2 would swap, where there is swap
            (directory.parent / "memory.swap.max").write_text("0")
        return directory

    def hungry(self) -> subprocess.Popen[bytes]:
        """Start a process that allocates 256 MiB when it is told to."""
        script = "import sys; sys.stdin.read(1); kept = bytearray(256 << 20); sys.stdin.read(1)"
        process = subprocess.Popen([sys.executable, "-ISc", script], stdin=subprocess.PIPE)
        self.addCleanup(self._end, process)
        assert process.stdin is not None
        self.addCleanup(process.stdin.close)
        return process

    async def feed(self, process: subprocess.Popen[bytes]) -> int:
        """Have it allocate. Return how it ended."""
        assert process.stdin is not None
        process.stdin.write(b"!")
        process.stdin.flush()
        return await deferToThread(process.wait)


@needs_systemd
class ScopeCase(Processes):
    """A real systemd, which sees only processes of its own namespace."""

    def setUp(self) -> None:
        self.manager: Systemd = shared()
        self.name = f"infranetes-{secrets.token_hex(16)}"
        self.slice = f"/kubepods.slice/kubepods-pod{secrets.token_hex(4)}.slice"
        self.scopes = SystemdScopes(reactor, Inside(self.manager), self.cgroups_of)
        self.outside: dict[int, int] = {}

    def cgroups_of(self, pid: int) -> Mapping[str, str]:
        return memberships(self.outside[pid])

    def inside(self) -> int:
        """Start a process that systemd sees. Return its pid in systemd's namespace."""
        entering = self.sleeping("nsenter", f"--target={self.manager.pid}", "--pid")
        children = Path(f"/proc/{entering.pid}/task/{entering.pid}/children")
        while not (found := children.read_text().split()):
            time.sleep(0.001)
        pid = int(found[0])
        self.addCleanup(kill, pid)
        number = int(Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].split()[1])
        self.outside[number] = pid
        return number

    def assert_placed(self, pid: int) -> None:
        where = self.cgroups_of(pid)
        units = where.get("name=systemd", where.get(cgroupfs.UNIFIED, ""))
        self.assertTrue(units.endswith(f"{self.slice}/{self.name}.scope"), where)
        self.assertIn(f"{self.slice}/", f"{where.get('memory', units)}/")

    async def bus(self) -> Bus:
        bus = await Bus.connect(reactor, Inside(self.manager), lambda *_: None, lambda: None)
        self.addCleanup(bus.close)
        return bus


def kill(pid: int) -> None:
    """Kill a process and wait until it has ended."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            select.select([descriptor], [], [], 10.0)
        finally:
            os.close(descriptor)
