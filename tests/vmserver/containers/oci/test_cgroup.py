# SPDX-License-Identifier: Apache-2.0
"""Cgroups of both versions, as the kernel shows them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from vmserver.containers.oci import cgroup
from vmserver.containers.oci.cgroup import Cgroup


class CgroupTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)

    def write(self, path: str, text: str = "") -> None:
        """Write a file like the kernel's."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def test_how_often_memory_ran_out_according_to_version_2(self) -> None:
        self.write("cgroup.controllers", "cpu memory pids\n")
        group = Cgroup("/pods/c1", self.root)
        self.assertIsNone(group.oom_kills())
        self.assertFalse(group.exists)
        for text, kills in (
            ("low 0\noom 7\noom_kill 2\noom_group_kill 9\n", 2),
            ("oom 7\noom_kill 0\n", 0),
            ("", 0),
        ):
            self.write("pods/c1/memory.events", text)
            self.assertEqual(group.oom_kills(), kills)
        self.assertTrue(group.exists)
        self.assertEqual(group.unified, self.root / "pods/c1")

    def test_how_often_memory_ran_out_according_to_version_1(self) -> None:
        self.write("memory/cgroup.procs")
        self.write("memory/pods/c1/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
        group = Cgroup("/pods/c1", self.root)
        self.assertEqual((group.oom_kills(), group.unified), (3, None))

    def test_version_2_freezes_and_tells_when_all_rest(self) -> None:
        self.write("cgroup.controllers")
        self.write("pods/c1/cgroup.freeze", "0")
        self.write("pods/c1/cgroup.events", "populated 1\nfrozen 0\n")
        group = Cgroup("/pods/c1", self.root)
        group.freeze()
        self.assertEqual((self.root / "pods/c1/cgroup.freeze").read_text(), "1")
        self.assertFalse(group.is_frozen)
        self.write("pods/c1/cgroup.events", "populated 1\nfrozen 1\n")
        self.assertTrue(group.is_frozen)
        group.thaw()
        self.assertEqual((self.root / "pods/c1/cgroup.freeze").read_text(), "0")

    def test_version_1_freezes_too(self) -> None:
        self.write("freezer/cgroup.procs")
        self.write("freezer/pods/c1/freezer.state", "THAWED")
        group = Cgroup("/pods/c1", self.root)
        self.assertFalse(group.is_frozen)
        group.freeze()
        self.assertTrue(group.is_frozen)
        self.write("freezer/pods/c1/freezer.state", "FREEZING\n")
        self.assertFalse(group.is_frozen)

    def test_one_that_is_gone_rests(self) -> None:
        for version in ("cgroup.controllers", "freezer/cgroup.procs"):
            self.write(version)
            group = Cgroup("/pods/c9", self.root)
            group.freeze()
            group.thaw()
            self.assertTrue(group.is_frozen)
            (self.root / version).unlink()

    def test_commands_in_it_are_killed_and_nothing_else(self) -> None:
        self.write("cgroup.controllers")
        for path in ("pods/c1", "pods/c1/exec-ab", "pods/c1/own"):
            self.write(f"{path}/cgroup.kill")
        Cgroup("/pods/c1", self.root).kill_commands()
        said = [
            (self.root / "pods/c1" / path / "cgroup.kill").read_text() for path in (".", "exec-ab", "own")
        ]
        self.assertEqual(said, ["", "1", ""])

    def test_killing_is_asked_of_the_kernel_where_it_can(self) -> None:
        self.write("cgroup.controllers")
        self.write("pods/c1/cgroup.kill")
        Cgroup("/pods/c1", self.root).kill()
        self.assertEqual((self.root / "pods/c1/cgroup.kill").read_text(), "1")

    def test_elsewhere_each_process_in_it_and_below_it_is_killed(self) -> None:
        children = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
        for controller in ("memory", "pids"):
            self.write(f"{controller}/cgroup.procs")
        self.write("pids/pods/c1/cgroup.procs", f"{children[0].pid}\n")
        self.write("pids/pods/c1/below/cgroup.procs", f"{children[1].pid}\n")
        self.write("memory/pods/c1/cgroup.procs", f"{children[0].pid}\n")
        group = Cgroup("/pods/c1", self.root)
        self.assertEqual(sorted(group.processes()), sorted(child.pid for child in children))
        group.kill()
        self.assertEqual([child.wait(10) for child in children], [-9, -9])

    def test_one_that_goes_while_it_is_looked_at_hides_no_other(self) -> None:
        """A group may be removed between its being listed and being read."""
        self.write("pids/cgroup.procs")
        self.write("pids/pods/c1/below/cgroup.procs", "7\n")
        (self.root / "pids/pods/c1/cgroup.procs").symlink_to("gone")
        self.assertEqual(Cgroup("/pods/c1", self.root).processes(), [7])

    def test_a_process_that_has_no_pid_here_is_not_taken_for_the_agents_own_group(self) -> None:
        """The kernel shows the processes of an outer namespace as 0, and kill(0) would be a suicide."""
        signalled: list[int] = []
        self.patch(os, "kill", lambda pid, signal: signalled.append(pid))
        self.write("pids/cgroup.procs")
        self.write("pids/pods/c1/cgroup.procs", "0\n")
        Cgroup("/pods/c1", self.root).kill()
        self.assertEqual(signalled, [])

    def test_one_that_is_gone_is_dead_already(self) -> None:
        group = Cgroup("/pods/c1", self.root)
        group.kill()
        self.assertEqual((group.processes(), group.oom_kills()), ([], None))

    def test_a_path_that_leads_elsewhere_is_refused(self) -> None:
        for path in ("", "/", "/../x", "/a/../../b"):
            with self.assertRaises(ValueError):
                Cgroup(path, self.root)

    def test_a_process_joins_every_hierarchy_and_what_is_not_empty_stays(self) -> None:
        for controller in ("memory", "pids"):
            self.write(f"{controller}/cgroup.procs")
        cgroup.join("infranetes.conmon/c1", 12, self.root)
        for controller in ("memory", "pids"):
            file = self.root / controller / "infranetes.conmon/c1/cgroup.procs"
            self.assertEqual(file.read_text(), "12")
        (self.root / "pids/infranetes.conmon/c1/cgroup.procs").unlink()
        cgroup.remove("infranetes.conmon/c1", self.root)
        self.assertFalse((self.root / "pids/infranetes.conmon/c1").exists())
        self.assertTrue((self.root / "memory/infranetes.conmon/c1").exists())

    def test_a_machine_without_cgroups_says_so(self) -> None:
        with self.assertRaises(OSError):
            cgroup.join("infranetes.conmon/c1", 12, self.root)
