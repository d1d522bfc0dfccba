# SPDX-License-Identifier: Apache-2.0
"""In which control group a VM is put, and what is known of its end there."""

from __future__ import annotations

from pathlib import Path

import attrs
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.logger import LogLevel, capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.interface import Size
from infranetes.providers.qemu.cgroups import cgroupfs
from infranetes.providers.qemu.cgroups.cgroupfs import memberships
from infranetes.providers.qemu.cgroups.placement import MOST_TASKS, Placement, PodRoom
from infranetes.providers.qemu.cgroups.scopes import SystemdScopes
from infranetes.providers.qemu.vm.record import VmRecord
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import installed
from infranetes_common.systemd_bus import BusError
from tests.infranetes.providers.qemu.cgroups.case import CgroupCase, ScopeCase, kill

reactor = installed()


class PodCgroupTests(CgroupCase):
    """In which group a VM is put, according to what kubelet says."""

    def setUp(self) -> None:
        super().setUp()
        self.placement = Placement(reactor, booted=Path(self.mktemp()))

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

    async def test_what_a_pod_has_left_of_its_limit(self) -> None:
        process = self.hungry()
        vm = self.vm(f"/{self.parent}")
        self.assertIsNone(self.placement.room(self.vm("")))
        await self.placement.place(vm, process.pid)
        self.assertIsNone(self.placement.room(vm), "it has no limit")
        self.limit_pod(64 << 20)
        left = self.placement.room(vm)
        assert left is not None
        self.assertLess(left, 64 << 20)
        self.assertGreater(left, 0)
        self._end(process)

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

        placement = Placement(reactor, scopes=Scopes(reactor), booted=Path("/"))
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

        placement = Placement(reactor, scopes=Scopes(reactor), booted=Path("/"))
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
        self.placement = Placement(reactor, scopes=self.scopes, booted=Path("/"))
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
