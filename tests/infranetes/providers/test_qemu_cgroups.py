# SPDX-License-Identifier: Apache-2.0
"""Processes are put into the control groups of pods: through cgroupfs, and by a real systemd."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import gatherResults
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.logger import LogLevel, capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.providers.cgroup_parents import group_path
from infranetes.providers.interface import Size
from infranetes.providers.qemu import cgroupfs
from infranetes.providers.qemu.cgroupfs import CgroupFiles, Kills, hierarchies, kills, memberships
from infranetes.providers.qemu.own_slice import MOST_TASKS
from infranetes.providers.qemu.pod_cgroups import PodCgroups, PodRoom
from infranetes.providers.qemu.record import VmRecord
from infranetes.providers.qemu.scopes import SystemdScopes, is_slice, slice_path
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument, Unavailable
from infranetes_common.reactors import installed
from infranetes_common.systemd_bus import Bus, BusError
from tests.harness.needs import needs_root, needs_systemd
from tests.support.systemd import Inside, Systemd, shared

reactor = installed()
ALONE = VmRecord("5" * 32, "s" * 32, "c", "n", "10.0.0.2", 0.0)  # a VM without a pod's group


async def refused(
    kind: type[InfranetesError], work: Coroutine[Any, Any, object]
) -> str:  # Any: of no interest
    """Return the message of the error with which `work` fails."""
    try:
        await work
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


class ParentTests(SynchronousTestCase):
    """The parent that kubelet names."""

    def test_it_is_below_each_mount(self) -> None:
        self.assertEqual(str(group_path("/kubepods/burstable/pod1")), "kubepods/burstable/pod1")
        self.assertEqual(str(group_path("kubepods//pod1/")), "kubepods/pod1")

    def test_none_leads_elsewhere(self) -> None:
        for parent in ("", "/", "..", "/kubepods/../..", "/a\nb", "/a\0", "/" + "a/" * 3000):
            self.assertRaises(InvalidArgument, group_path, parent)

    def test_a_slice_is_where_its_name_says(self) -> None:
        whole = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice"
        self.assertEqual(f"/{slice_path(whole)}", whole)
        self.assertEqual(f"/{slice_path(whole.rpartition('/')[2])}", whole)
        self.assertEqual(str(slice_path("/test.slice")), "test.slice")
        self.assertTrue(is_slice(whole))
        self.assertFalse(is_slice("/kubepods/burstable/pod1"))


class HierarchyTests(SynchronousTestCase):
    """Which hierarchies are mounted, according to the kernel."""

    def found(self, *lines: str) -> list[tuple[str, str]]:
        path = Path(self.mktemp())
        path.write_text("\n".join(lines) + "\n")
        return [(str(each.mount), each.name) for each in hierarchies(path)]

    def test_version_2_alone(self) -> None:
        found = self.found(
            "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw",
            "30 23 0:26 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot",
        )
        self.assertEqual(found, [("/sys/fs/cgroup", "")])

    def test_version_1_beside_version_2(self) -> None:
        found = self.found(
            "40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd",
            "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
            "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
            r"35 31 0:32 / /mnt/a\040b rw - cgroup cgroup rw,memory",
            "36 31 0:32 / /elsewhere rw - cgroup cgroup rw,memory",
            "37 31 0:33 /docker/1 /part rw - cgroup cgroup rw,pids",
        )
        self.assertEqual(
            found,
            [
                ("/sys/fs/cgroup/systemd", "name=systemd"),
                ("/sys/fs/cgroup/cpu,cpuacct", "cpu,cpuacct"),
                ("/sys/fs/cgroup/unified", ""),
                ("/mnt/a b", "memory"),
            ],
        )

    def test_this_machines_are_those_of_a_process(self) -> None:
        self.assertLessEqual({each.name for each in hierarchies()}, set(memberships(os.getpid())))


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


class CgroupFileTests(CgroupCase):
    """Groups that the daemon makes."""

    async def test_a_process_is_below_the_parent_wherever_there_is_one(self) -> None:
        process = self.sleeping()
        for _ in range(2):
            await self.groups.place(process.pid, f"/{self.parent}", self.name)
            self.assertEqual(self.where(process.pid), {f"/{self.parent}/{self.name}"})
        self._end(process)
        for _ in range(2):
            await self.groups.forget(f"/{self.parent}", self.name)
            self.assertEqual([], list(self.left()))

    async def test_without_the_parent_it_stays_where_it_was(self) -> None:
        process = self.sleeping()
        before = memberships(process.pid)
        error = await refused(
            Unavailable, self.groups.place(process.pid, "/infranetes-tests-none/pod", self.name)
        )
        self.assertIn("/infranetes-tests-none/pod", error)
        self.assertEqual(memberships(process.pid), before)

    async def test_of_a_process_that_has_ended_nothing_is_left(self) -> None:
        process = self.sleeping()
        self._end(process)
        error = await refused(Unavailable, self.groups.place(process.pid, self.parent, self.name))
        self.assertIn("has ended", error)
        self.assertEqual(self.left(), [])

    async def test_a_group_that_kubelet_has_removed_is_forgotten(self) -> None:
        await self.groups.forget("/infranetes-tests-none/pod", self.name)

    async def test_many_at_once_are_each_in_their_own(self) -> None:
        processes = [self.sleeping() for _ in range(8)]
        names = [f"{self.name[:-1]}{number:x}" for number in range(8)]
        placing = zip(processes, names, strict=True)
        await gatherResults([start(self.groups.place(each.pid, self.parent, name)) for each, name in placing])
        for process, name in zip(processes, names, strict=True):
            self.assertEqual(self.where(process.pid), {f"/{self.parent}/{name}"})
            self._end(process)
        for name in names:
            await self.groups.forget(self.parent, name)
        self.assertEqual([path for name in names for path in self.directories(name) if path.exists()], [])

    def directories(self, name: str) -> list[Path]:
        return [path for _, path in self.groups.directories(self.parent, name)]

    async def test_memory_that_it_wants_in_vain_is_told(self) -> None:
        """The kernel kills only this process, and counts that in its group."""
        process = self.hungry()
        await self.groups.place(process.pid, self.parent, self.name)
        directory = self.limit_pod(64 << 20)
        self.assertEqual(cgroupfs.memory_limit(directory.parent), 64 << 20)
        self.assertEqual(kills(directory), Kills())
        self.assertEqual(await self.feed(process), -9)
        self.assertTrue(kills(directory).more_than(Kills()), kills(directory))

    def test_a_group_that_is_gone_has_counted_nothing(self) -> None:
        self.assertEqual(kills(Path(self.mktemp()) / "pod" / "vm"), Kills())
        self.assertEqual(cgroupfs.memory_limit(Path(self.mktemp())), 0)


class PinTests(CgroupCase):
    """Processors and memory nodes, by the kernel's own groups."""

    def setUp(self) -> None:
        super().setUp()
        for hierarchy in hierarchies():
            if hierarchy.name == cgroupfs.UNIFIED and hierarchy.has("cpuset"):
                for directory in (hierarchy.mount, hierarchy.mount / Path(self.parent).parent):
                    (directory / "cgroup.subtree_control").write_text("+cpuset")
        self.cpus = sorted(os.sched_getaffinity(0))

    def allowed(self, pid: int) -> set[frozenset[int]]:
        """Return the processors of each thread."""
        threads = Path(f"/proc/{pid}/task").iterdir()
        return {frozenset(os.sched_getaffinity(int(each.name))) for each in threads}

    async def test_a_vm_has_those_that_it_is_given_until_it_is_given_others(self) -> None:
        process, last = self.sleeping(), self.cpus[-1]
        record = attrs.evolve(ALONE, cgroup_parent=f"/{self.parent}", token=self.name.partition("-")[2])
        placement = PodCgroups(reactor, self.groups, booted=Path(self.mktemp()))
        await placement.place(record, process.pid)
        everything = frozenset(self.cpus)
        for cpus, wanted in ((str(last), {last}), ("", everything), (f"0-{last}", everything)):
            await placement.pin(record, process.pid, cpus, "0")
            self.assertEqual(self.allowed(process.pid), {frozenset(wanted)})
            self.assertIn("Mems_allowed_list:\t0\n", Path(f"/proc/{process.pid}/status").read_text())
        await placement.place(record, process.pid)  # a daemon that is restarted
        self.assertEqual(self.where(process.pid), {f"/{self.parent}/{self.name}"})
        self._end(process)
        await placement.forget(record)
        self.assertEqual(self.left(), [])

    async def test_with_version_1_a_group_is_made_where_systemd_made_none(self) -> None:
        process, last = self.sleeping(), self.cpus[-1]
        pins = await self.groups.pin(process.pid, self.parent, self.name, str(last), "")
        self.assertEqual(pins, any(each.name == "cpuset" for each in hierarchies()))
        self.assertEqual(self.allowed(process.pid), {frozenset({last})})
        self._end(process)
        await self.groups.forget(self.parent, self.name)
        self.assertEqual(self.left(), [])

    async def test_one_without_a_group_is_pinned_thread_by_thread(self) -> None:
        script = "import threading as t, time; t.Thread(target=time.sleep, args=(600,)).start()"
        process = subprocess.Popen([sys.executable, "-ISc", script])
        self.addCleanup(self._end, process)
        while len(list(Path(f"/proc/{process.pid}/task").iterdir())) < 2:
            time.sleep(0.01)
        placement = PodCgroups(reactor, self.groups, booted=Path(self.mktemp()))
        with capturedLogs() as told:
            await placement.pin(ALONE, process.pid, str(self.cpus[0]), "0")
        self.assertEqual(self.allowed(process.pid), {frozenset(self.cpus[:1])})
        self.assertIn("uses all of the node's memory", formatEvent(told[-1]))
        await placement.pin(ALONE, process.pid, "", "")
        self.assertEqual(self.allowed(process.pid), {frozenset(self.cpus)})

    async def test_processors_that_the_node_lacks_are_refused_and_so_is_a_process_that_has_ended(
        self,
    ) -> None:
        process = self.sleeping()
        for parent in ("", self.parent):
            if parent:
                await self.groups.place(process.pid, parent, self.name)
            if parent and not any(each.name == "cpuset" for each in hierarchies()):
                break  # version 2 takes any number
            error = await refused(
                InvalidArgument, self.groups.pin(process.pid, parent, self.name, "4000", "")
            )
            self.assertIn("4000", error)
        self._end(process)
        await refused(Unavailable, self.groups.pin(process.pid, "", self.name, "0", ""))


class UnifiedTests(TestCase):
    """Version 2, with ordinary files instead of the kernel's."""

    def setUp(self) -> None:
        self.top = Path(self.mktemp()).absolute()
        self.pod = self.top / "cgroup/kubepods/pod1"
        self.pod.mkdir(parents=True)
        for directory in (self.top / "cgroup", self.pod):
            (directory / "cgroup.controllers").write_text("cpu memory pids\n")
        mounts = self.top / "mountinfo"
        mounts.write_text(f"30 23 0:26 / {self.top}/cgroup rw - cgroup2 cgroup2 rw\n")
        self.proc = self.top / "proc"
        (self.proc / "42").mkdir(parents=True)
        self.is_in("/kubepods/pod1/vm")
        self.groups = CgroupFiles(reactor, mounts, self.proc)

    def is_in(self, path: str) -> None:
        (self.proc / "42/cgroup").write_text(f"0::{path}\n")

    async def test_the_parents_controllers_are_handed_down(self) -> None:
        await self.groups.place(42, "/kubepods/pod1", "vm")
        self.assertEqual((self.pod / "cgroup.subtree_control").read_text(), "+cpu +memory +pids")
        self.assertEqual((self.pod / "vm/cgroup.procs").read_text(), "42")

    async def test_where_the_parent_hands_it_down_the_group_pins(self) -> None:
        vm = self.pod / "vm"
        for directory in (self.top / "cgroup", self.pod):
            (directory / "cgroup.controllers").write_text("cpuset cpu memory pids\n")
        await self.groups.place(42, "/kubepods/pod1", "vm")
        for file in ("cpuset.cpus", "cpuset.mems"):
            (vm / file).write_text("\n")
        for cpus, mems in (("2-3,8", "0-1"), ("", "")):
            self.assertTrue(await self.groups.pin(42, "/kubepods/pod1", "vm", cpus, mems))
            found = [(vm / file).read_text() for file in ("cpuset.cpus", "cpuset.mems")]
            self.assertEqual(found, [f"{cpus}\n", f"{mems}\n"])
        self.is_in("/kubepods.slice/pod1.slice/vm.scope")  # systemd's, which has made the files
        scope = self.top / "cgroup/kubepods.slice/pod1.slice/vm.scope"
        scope.mkdir(parents=True)
        for file in ("cpuset.cpus", "cpuset.mems"):
            (scope / file).write_text("")
        self.assertTrue(await self.groups.pin(42, "/kubepods.slice/pod1.slice", "vm", "1", ""))
        self.assertEqual((scope / "cpuset.cpus").read_text(), "1\n")

    async def test_a_process_that_is_elsewhere_afterwards_is_told(self) -> None:
        self.is_in("/system.slice/infranetes.service")
        error = await refused(Unavailable, self.groups.place(42, "/kubepods/pod1", "vm"))
        self.assertIn("/system.slice/infranetes.service", error)

    async def test_where_the_daemon_may_not_write_it_says_what_to_set(self) -> None:
        (self.pod / "vm").mkdir()
        (self.pod / "vm/cgroup.procs").symlink_to("/sys/kernel/uevent_seqnum")  # which can't be written to
        error = await refused(FailedPrecondition, self.groups.place(42, "/kubepods/pod1", "vm"))
        self.assertIn("ProtectControlGroups=no", error)


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


class ScopeTests(ScopeCase):
    """Scopes below pods' slices."""

    async def test_a_process_is_below_its_pods_slice(self) -> None:
        pid = await deferToThread(self.inside)
        for _ in range(2):
            await self.scopes.place(pid, self.slice, self.name, "the VM of pod a/b")
            self.assert_placed(pid)
        (path,) = await (await self.bus()).manager("GetUnit", "s", (f"{self.name}.scope",))
        unit = await (await self.bus()).properties(path, "Unit")
        self.assertEqual(unit["Description"], "the VM of pod a/b")
        kill(self.outside[pid])
        await self.scopes.forget(self.slice, self.name)

    async def test_its_processors_are_a_property_of_its_scope(self) -> None:
        """Of version 2 systemd then enables the controller for the slices above."""
        pid = await deferToThread(self.inside)
        await self.scopes.place(pid, self.slice, self.name)
        await self.scopes.set(self.name, {"AllowedCPUs": ("ay", [5]), "AllowedMemoryNodes": ("ay", [1])})
        (path,) = await (await self.bus()).manager("GetUnit", "s", (f"{self.name}.scope",))
        unit = await (await self.bus()).properties(path, "Scope")
        masks = [bytes(unit[name]).rstrip(b"\0") for name in ("AllowedCPUs", "AllowedMemoryNodes")]
        self.assertEqual(masks, [b"\5", b"\1"])
        error = await refused(Unavailable, self.scopes.set("none", {"AllowedCPUs": ("ay", [1])}))
        self.assertIn("none.scope", error)

    async def test_systemd_reads_its_units_again_meanwhile(self) -> None:
        pid = await deferToThread(self.inside)
        bus = await self.bus()
        placing = start(self.scopes.place(pid, self.slice, self.name))
        reloading = start(bus.manager("Reload"))
        await placing
        await reloading
        self.assert_placed(pid)
        await bus.manager("Reload")
        self.assert_placed(pid)

    async def test_several_are_placed_at_once(self) -> None:
        pids = [await deferToThread(self.inside) for _ in range(4)]
        name = self.name[:-1]
        await gatherResults(
            [start(self.scopes.place(pid, self.slice, f"{name}{at}")) for at, pid in enumerate(pids)]
        )
        for at, pid in enumerate(pids):
            self.name = f"{name}{at}"
            self.assert_placed(pid)

    async def test_one_that_has_ended_is_told(self) -> None:
        pid = await deferToThread(self.inside)
        kill(self.outside[pid])
        error = await refused(Unavailable, self.scopes.place(pid, self.slice, self.name))
        self.assertIn("has ended", error)

    async def test_one_that_systemd_does_not_know_is_told(self) -> None:
        process = self.sleeping()
        self.outside[4_000_000] = process.pid
        error = await refused(Unavailable, self.scopes.place(4_000_000, self.slice, self.name))
        self.assertIn(self.slice.rpartition("/")[2], error)

    async def test_a_scope_of_the_name_with_other_processes_is_not_taken_over(self) -> None:
        first, second = await deferToThread(self.inside), await deferToThread(self.inside)
        await self.scopes.place(first, self.slice, self.name)
        error = await refused(Unavailable, self.scopes.place(second, self.slice, self.name))
        self.assertIn("already", error)
        self.assert_placed(first)

    async def test_what_is_no_slice_is_refused(self) -> None:
        pid = await deferToThread(self.inside)
        await refused(InvalidArgument, self.scopes.place(pid, "/../x.slice/..", self.name))
        await refused(Unavailable, self.scopes.place(pid, "/a--b.slice", self.name))


def kill(pid: int) -> None:
    """Kill a process and wait until it has ended."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            select.select([descriptor], [], [], 10.0)
        finally:
            os.close(descriptor)


class PodCgroupTests(CgroupCase):
    """In which group a VM is put, according to what kubelet says."""

    def setUp(self) -> None:
        super().setUp()
        self.placement = PodCgroups(reactor, booted=Path(self.mktemp()))

    def vm(self, parent: str) -> VmRecord:
        token = self.name.partition("-")[2]
        return VmRecord(token, "s" * 32, "c", "n", "10.0.0.2", 0.0, cgroup_parent=parent)

    async def test_a_vm_counts_in_its_pods_group(self) -> None:
        process = self.sleeping()
        vm = self.vm(f"/{self.parent}")
        for _ in range(2):
            await self.placement.place(vm, process.pid)
            self.assertEqual(self.where(process.pid), {f"/{self.parent}/{self.name}"})
        self._end(process)
        self.assertEqual(self.placement.why_ended(vm), "")
        for _ in range(2):
            await self.placement.forget(vm)
        self.assertEqual(self.left(), [])

    async def test_one_whose_record_has_no_possible_group_is_removed_all_the_same(self) -> None:
        """As it may be recorded by a release that took whatever it was told."""
        for parent in ("/../../etc", "/..", "pod\0", "../x.slice"):
            vm = self.vm(parent)
            await self.placement.forget(vm)
            self.assertEqual(self.placement.why_ended(vm), "")
        self.assertEqual(self.left(), [])

    async def test_one_without_a_group_stays_where_it_is(self) -> None:
        process = self.sleeping()
        before = memberships(process.pid)
        vm = self.vm("")
        await self.placement.place(vm, process.pid)
        self.assertEqual(memberships(process.pid), before)
        self.assertEqual(self.placement.why_ended(vm), "")
        await self.placement.forget(vm)

    async def test_of_one_that_the_kernel_has_killed_it_tells_the_pods_limit(self) -> None:
        process = self.hungry()
        vm = self.vm(f"/{self.parent}")
        await self.placement.place(vm, process.pid)
        self.limit_pod(64 << 20)
        self.assertEqual(self.placement.why_ended(vm), "")
        self.assertEqual(await self.feed(process), -9)
        told = self.placement.why_ended(vm)
        self.assertIn("want of memory", told)
        self.assertIn("64 MiB", told)
        await self.placement.forget(vm)
        self.assertEqual(self.placement.why_ended(vm), "")

    async def test_where_systemd_does_not_run_a_slice_is_nobodys(self) -> None:
        """As when a client names a slice because the node's configuration says `systemd`."""
        process = self.sleeping()
        before = memberships(process.pid)
        vm = self.vm("/test.slice")
        with capturedLogs() as events:
            for _ in range(2):
                await self.placement.place(vm, process.pid)
        self.assertEqual(memberships(process.pid), before)
        self.assertEqual(len([event for event in events if event["log_level"] is LogLevel.warn]), 1)
        self.assertEqual(self.placement.why_ended(vm), "")
        await self.placement.forget(vm)

    async def test_one_without_a_group_runs_on_where_systemd_does_not_answer(self) -> None:
        class Scopes(SystemdScopes):
            async def place(self, *_: object, **__: object) -> None:
                raise Unavailable("systemd does not answer on its socket")

        placement = PodCgroups(reactor, scopes=Scopes(reactor), booted=Path("/"))
        with capturedLogs() as events:
            for _ in range(2):
                await placement.place(self.vm(""), 42)
        (warning,) = [formatEvent(event) for event in events if event["log_level"] is LogLevel.warn]
        self.assertIn("is accounted to the daemon", warning)
        self.assertIn("systemd does not answer", warning)

    async def test_below_a_slice_it_is_systemd_who_puts_it_there(self) -> None:
        asked: list[tuple[int, str, str]] = []

        class Scopes(SystemdScopes):
            async def place(self, pid: int, parent: str, name: str, *_: object, **__: object) -> None:
                asked.append((pid, parent, name))

        placement = PodCgroups(reactor, scopes=Scopes(reactor), booted=Path("/"))
        vm = self.vm("/kubepods.slice/kubepods-pod1.slice")
        await placement.place(vm, 42)
        self.assertEqual(asked, [(42, "/kubepods.slice/kubepods-pod1.slice", self.name)])
        self.assertEqual(placement.why_ended(vm), "")
        await placement.forget(vm)


class PodRoomTests(SynchronousTestCase):
    """A pod's limit that is too low for its VM."""

    def setUp(self) -> None:
        self.room = PodRoom(384 << 20)

    def groups(self, *sizes: Size) -> list[str]:
        return [self.room.group_of("s" * 32, "/kubepods/pod1", size) for size in sizes]

    def test_with_room_or_without_a_limit_a_vm_counts_in_its_pod(self) -> None:
        sizes = Size(), Size(2000), Size(0, 1 << 30, 384 << 20), Size(0, 0, 1), Size(0, 64 << 20, 1 << 30)
        with capturedLogs() as events:
            self.assertEqual(set(self.groups(*sizes)), {"/kubepods/pod1"})
        self.assertEqual(events, [])

    def test_a_request_is_no_limit(self) -> None:
        self.assertEqual(self.groups(Size(0, 1 << 30, memory_limited=False)), ["/kubepods/pod1"])

    def test_without_room_it_does_not_and_once_it_is_said_how_much_it_takes(self) -> None:
        with capturedLogs() as events:
            self.assertEqual(set(self.groups(Size(0, 1 << 30), Size(0, 1 << 30, 383 << 20))), {""})
        (event,) = events
        self.assertIn("memory: 384Mi", formatEvent(event))

    def test_one_without_a_group_is_no_trouble(self) -> None:
        with capturedLogs() as events:
            self.assertEqual(self.room.group_of("s" * 32, "", Size(0, 1 << 30)), "")
        self.assertEqual(events, [])


class OwnSliceTests(ScopeCase):
    """VMs without a pod's group, with a real systemd."""

    def setUp(self) -> None:
        super().setUp()
        self.placement = PodCgroups(reactor, scopes=self.scopes, booted=Path("/"))
        token = self.name.partition("-")[2]
        self.vm = VmRecord(token, "s" * 32, "c", "n", "10.0.0.2", 0.0)
        self.own = f"/infranetes.slice/infranetes-vm-{token}.scope"

    def unit_of(self, pid: int) -> str:
        where = self.cgroups_of(pid)
        return where.get("name=systemd", where.get(cgroupfs.UNIFIED, ""))

    async def test_it_has_a_scope_of_its_own_with_a_limit(self) -> None:
        pid = await deferToThread(self.inside)
        for _ in range(2):
            await self.placement.place(self.vm, pid)
            self.assertTrue(self.unit_of(pid).endswith(self.own), self.unit_of(pid))
        bus = await self.bus()
        (path,) = await bus.manager("GetUnit", "s", (self.own.rpartition("/")[2],))
        self.assertEqual((await bus.properties(path, "Scope"))["TasksMax"], MOST_TASKS)

    async def test_a_pod_that_has_it_then_counts_it_in_its_group(self) -> None:
        pid = await deferToThread(self.inside)
        await self.placement.place(self.vm, pid)
        await self.placement.place(attrs.evolve(self.vm, cgroup_parent=self.slice), pid)
        self.assert_placed(pid)
        await self.gone(self.own.rpartition("/")[2])

    async def test_with_the_vm_its_scope_ends_though_the_daemon_that_made_it_was_killed(self) -> None:
        pid = await deferToThread(self.inside)
        await self.placement.place(self.vm, pid)
        kill(self.outside[pid])
        await self.gone(self.own.rpartition("/")[2])

    async def gone(self, unit: str) -> None:
        """Wait until systemd has forgotten the unit."""
        bus = await self.bus()
        while True:
            try:
                await bus.manager("GetUnit", "s", (unit,))
            except BusError:
                return
            await deferLater(reactor, 0.05, lambda: None)
