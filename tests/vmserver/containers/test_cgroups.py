# SPDX-License-Identifier: Apache-2.0
"""Limits are written to cgroups, and stored for a restarted agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.wire import cri
from vmserver.containers.docker import cgroups
from vmserver.containers.docker.limits import LimitStore
from vmserver.containers.docker.message_store import MessageStore

PID = 42
_FILES = {
    "cpu.max": "max 100000", "cpu.weight": "100", "memory.max": "max", "memory.swap.max": "max",
    "memory.current": "1000", "memory.high": "max", "cpuset.cpus": "", "cpuset.mems": "",
}  # fmt: skip


def limits(**fields: Any) -> Any:
    return cri.LinuxContainerResources(**fields)


class CgroupTests(SynchronousTestCase):
    """With a tree of plain files instead of the kernel's."""

    def setUp(self) -> None:
        top = Path(self.mktemp())
        self.proc, self.cgroup2 = top / "proc", top / "cgroup"
        (self.proc / str(PID)).mkdir(parents=True)

    def group(self, path: str) -> Path:
        (self.proc / str(PID) / "cgroup").write_text(f"0::/{path}\n")
        directory = self.cgroup2
        for part in path.split("/"):
            directory /= part
            directory.mkdir(parents=True, exist_ok=True)
            for name, value in _FILES.items():
                (directory / name).write_text(value)
        return directory

    def apply(self, every: bool = True, **fields: Any) -> None:
        cgroups.apply(PID, limits(**fields), self.cgroup2, every=every, proc=self.proc)

    def test_every_limit_has_its_file(self) -> None:
        group = self.group("docker-x.scope")
        self.apply(
            cpu_quota=50000, cpu_period=200000, cpu_shares=1024, memory_limit_in_bytes=4096,
            memory_swap_limit_in_bytes=6144, cpuset_cpus="0", unified={"memory.high": "3000"},
            hugepage_limits=[cri.HugepageLimit(page_size="2MB", limit=0)],
        )  # fmt: skip
        found = {name: (group / name).read_text() for name in _FILES}
        expected = {"cpu.max": "50000 200000", "cpu.weight": "39", "memory.max": "4096", "cpuset.cpus": "0"}
        expected |= {"memory.swap.max": "2048", "memory.high": "3000"}
        self.assertEqual(found, {**_FILES, **expected})

    def test_missing_limits_stay_as_they_are(self) -> None:
        group = self.group("x")
        (group / "cpu.max").write_text("50000 200000\n")
        self.apply(cpu_period=100000)
        self.assertEqual((group / "cpu.max").read_text(), "50000 100000")
        self.apply(cpu_quota=-1)
        self.assertEqual((group / "cpu.max").read_text(), "max 100000")
        self.apply(memory_limit_in_bytes=4096)
        self.assertEqual((group / "memory.swap.max").read_text(), "0")
        self.apply(memory_limit_in_bytes=-1)
        self.assertEqual((group / "memory.max").read_text(), "max")
        self.assertEqual((group / "memory.swap.max").read_text(), "max")
        self.apply(every=False, cpu_shares=2)
        self.assertEqual((group / "cpu.weight").read_text(), "100")
        self.apply(cpu_shares=2)
        self.assertEqual((group / "cpu.weight").read_text(), "1")

    def test_a_group_below_the_scope_gets_the_same(self) -> None:
        group = self.group("docker-x.scope/container")
        self.apply(memory_limit_in_bytes=4096)
        self.assertEqual((group / "memory.max").read_text(), "4096")
        self.assertEqual((group.parent / "memory.max").read_text(), "4096")

    def test_what_is_not_supported_is_refused(self) -> None:
        self.group("x")
        error = self.assertRaises(InvalidArgument, self.apply, memory_limit_in_bytes=999)
        self.assertIn("1000 bytes are in use", str(error))
        error = self.assertRaises(InvalidArgument, self.apply, unified={"io.max": "1"})
        self.assertIn("no such limit", str(error))

    def test_a_vm_without_cgroup_2_takes_what_kubelet_adds_where_its_node_has_it(self) -> None:
        without = Path(self.mktemp())
        cgroups.check(limits(unified={"memory.oom.group": "1", "memory.swap.max": "0"}), without)
        error = self.assertRaises(InvalidArgument, cgroups.check, limits(unified={"pids.max": "1"}), without)
        self.assertIn("resources.unified: pids.max", str(error))

    def test_a_process_that_has_ended_has_none(self) -> None:
        self.apply(memory_limit_in_bytes=1)


class MessageStoreTests(SynchronousTestCase):
    def test_they_are_stored_until_the_container_is_removed(self) -> None:
        directory = Path(self.mktemp()) / "limits"
        kept = LimitStore(directory)
        kept.load()
        self.assertIsNone(kept.get("c1"))
        kept.put("c1", limits(memory_limit_in_bytes=5, unified={"memory.low": "1"}))
        kept.put("c1", limits(cpu_shares=7, unified={"memory.high": "2"}))
        (directory / "broken").write_bytes(b"\xff")
        again = LimitStore(directory)
        again.load()
        expected = limits(
            memory_limit_in_bytes=5, memory_swap_limit_in_bytes=5, cpu_shares=7,
            unified={"memory.low": "1", "memory.high": "2"},
        )  # fmt: skip
        self.assertEqual(again.get("c1"), expected)
        self.assertIsNone(again.get("broken"))
        for _ in range(2):
            again.remove("c1")
        self.assertFalse((directory / "c1").exists())
        (directory / "c2").mkdir()
        self.assertRaises(FailedPrecondition, again.put, "c2", limits(cpu_shares=1))
        self.assertIsNone(again.get("c2"))

    def test_what_is_only_remembered_is_lost_with_the_agent(self) -> None:
        directory = Path(self.mktemp()) / "users"
        kept = MessageStore(directory, cri.ContainerUser)
        user = cri.ContainerUser(linux=cri.LinuxContainerUser(uid=7))
        kept.put("c1", user)
        kept.remember("c2", user)
        self.assertEqual((kept.get("c2"), kept.ids()), (user, {"c1", "c2"}))
        again = MessageStore(directory, cri.ContainerUser)
        again.load()
        self.assertEqual((again.get("c1"), again.ids()), (user, {"c1"}))

    def test_what_a_killed_agent_was_writing_is_no_message(self) -> None:
        directory = Path(self.mktemp()) / "users"
        directory.mkdir(parents=True)
        user = cri.ContainerUser(linux=cri.LinuxContainerUser(uid=7))
        (directory / "c1.new").write_bytes(user.SerializeToString())
        store = MessageStore(directory, cri.ContainerUser)
        store.load()
        self.assertEqual(store.ids(), set())
        store.put("c1", user)
        self.assertEqual([path.name for path in directory.iterdir()], ["c1"])
