# SPDX-License-Identifier: Apache-2.0
"""Processes are put into the control groups of pods through cgroupfs, and pinned to processors."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import attrs
from twisted.internet.defer import gatherResults
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.providers.cgroup_parents import group_path, is_slice, slice_path
from infranetes.providers.qemu.cgroups import cgroupfs
from infranetes.providers.qemu.cgroups.cgroupfs import CgroupFiles, Kills, hierarchies, kills, memberships
from infranetes.providers.qemu.cgroups.placement import Placement
from infranetes.providers.qemu.vm.record import VmRecord
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InvalidArgument, Unavailable
from infranetes_common.reactors import installed
from tests.infranetes.providers.qemu.cgroups.case import CgroupCase, refused

reactor = installed()
ALONE = VmRecord("5" * 32, "s" * 32, "c", "n", "10.0.0.2", 0.0)  # a VM without a pod's group


class ParentTests(SynchronousTestCase):
    """The parent that kubelet names."""

    def test_it_is_below_each_mount(self) -> None:
        self.assertEqual(str(group_path("/kubepods/burstable/pod1")), "kubepods/burstable/pod1")
        self.assertEqual(str(group_path("kubepods//pod1/")), "kubepods/pod1")

    def test_none_leads_elsewhere(self) -> None:
        for parent in ("", "/", "..", "/kubepods/../..", "/a\nb", "/a\0", "/" + "a/" * 3000):
            self.assertRaises(InvalidArgument, group_path, parent)

    def test_none_is_longer_than_the_kernel_takes(self) -> None:
        """A slice is in a directory for each of its words, so that its name is short and its path is long."""
        for fits in ("a" * 255, "/kubepods/" + "é" * 127, "-".join("a" * 50) + ".slice"):
            group_path(fits)
        for parent in ("a" * 256, "/kubepods/" + "é" * 128 + "/pod1", "-".join("a" * 124) + ".slice"):
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
        path.write_bytes(os.fsencode("\n".join(lines) + "\n"))
        return [(str(each.mount), each.name) for each in hierarchies(path)]

    def test_version_2_alone(self) -> None:
        found = self.found(
            "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw",
            "23 22 8:1 /a /mnt/a\rcaf\udce9 rw - ext4 /dev/vda1 rw",
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

    async def test_a_group_with_a_process_that_does_not_end_is_left_to_the_pods_owner(self) -> None:
        """Removing it is not tried for ever."""
        self.patch(cgroupfs, "_REMOVE_SECONDS", 0.05)
        process = self.sleeping()
        await self.groups.place(process.pid, self.parent, self.name)
        await self.groups.forget(self.parent, self.name)
        self.assertTrue(self.left())
        self._end(process)
        await self.groups.forget(self.parent, self.name)
        self.assertEqual(self.left(), [])

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
        placement = Placement(reactor, self.groups, booted=Path(self.mktemp()))
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
        placement = Placement(reactor, self.groups, booted=Path(self.mktemp()))
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

    async def test_what_systemd_was_asked_for_is_waited_for_a_moment(self) -> None:
        for directory in (self.top / "cgroup", self.pod):
            (directory / "cgroup.controllers").write_text("cpuset cpu memory pids\n")
        (self.proc / "42/task").mkdir()
        scope = self.top / "cgroup/kubepods.slice/pod1.slice/vm.scope"
        scope.mkdir(parents=True)
        self.is_in("/kubepods.slice/pod1.slice/vm.scope")
        pinning = start(self.groups.pin(42, "/kubepods.slice/pod1.slice", "vm", "1", "0", settling=True))
        self.assertFalse(await self.groups.pin(42, "/kubepods.slice/pod1.slice", "vm", "1", "0"))
        for file in ("cpuset.mems", "cpuset.cpus"):
            (scope / file).write_text("")
        self.assertTrue(await pinning)
        self.assertEqual((scope / "cpuset.cpus").read_text(), "1\n")

    async def test_where_the_daemon_may_not_write_to_groups_threads_are_pinned(self) -> None:
        (self.top / "cgroup/cgroup.controllers").write_text("cpuset cpu memory pids\n")
        (self.pod / "vm").mkdir()
        for file in ("cpuset.cpus", "cpuset.mems"):
            (self.pod / "vm" / file).write_text("")
        (self.proc / "42/task").mkdir()

        errors = [errno.EROFS, errno.EPERM, errno.EINVAL]

        def refuse(*_: object) -> None:
            number = errors.pop(0)
            raise OSError(number, os.strerror(number))

        self.patch(cgroupfs, "_write", refuse)
        for _ in range(2):
            self.assertFalse(await self.groups.pin(42, "/kubepods/pod1", "vm", "1", "0"))
        error = await refused(InvalidArgument, self.groups.pin(42, "/kubepods/pod1", "vm", "1", "0"))
        self.assertIn("processors 1 and memory nodes 0: Invalid argument", error)

    async def test_a_process_that_is_elsewhere_afterwards_is_told(self) -> None:
        self.is_in("/system.slice/infranetes.service")
        error = await refused(Unavailable, self.groups.place(42, "/kubepods/pod1", "vm"))
        self.assertIn("/system.slice/infranetes.service", error)

    async def test_what_is_in_the_way_is_told(self) -> None:
        (self.pod / "vm").write_text("")
        error = await refused(Unavailable, self.groups.place(42, "/kubepods/pod1", "vm"))
        self.assertIn("the control group /kubepods/pod1/vm can't be made", error)

    async def test_where_the_daemon_may_not_write_it_says_what_to_set(self) -> None:
        (self.pod / "vm").mkdir()
        (self.pod / "vm/cgroup.procs").symlink_to("/sys/kernel/uevent_seqnum")  # which can't be written to
        error = await refused(FailedPrecondition, self.groups.place(42, "/kubepods/pod1", "vm"))
        self.assertIn("ProtectControlGroups=no", error)
