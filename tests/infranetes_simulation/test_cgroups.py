# SPDX-License-Identifier: Apache-2.0
"""The cgroups of simulated VMs, in directories that stand for the kernel's."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes_simulation.machine import cgroups


class CgroupTests(SynchronousTestCase):
    """A file keeps what was last written to it, so of several controllers the last."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp())
        self.root.mkdir()

    def test_with_version_2_controllers_are_given_to_every_cgroup_on_the_way(self) -> None:
        (self.root / "cgroup.procs").touch()
        (self.root / "cgroup.controllers").write_text("memory\n")
        vms = self.root / "vms"
        vms.mkdir()
        (vms / "cgroup.controllers").write_text("memory\n")
        cgroups.join("vms/one", 7, self.root)
        for directory in (self.root, vms):
            self.assertEqual((directory / "cgroup.subtree_control").read_text(), "+memory")
        self.assertEqual((vms / "one" / "cgroup.procs").read_text(), "7")
        self.assertFalse((vms / "one" / "cgroup.subtree_control").exists())

    def test_with_version_1_a_cpuset_has_what_the_one_above_it_has(self) -> None:
        for name in ("cpuset", "memory"):
            (self.root / name).mkdir()
            (self.root / name / "cgroup.procs").touch()
        made = self.root / "cpuset" / "one"
        made.mkdir()
        for file, text in (("cpuset.cpus", "0-1\n"), ("cpuset.mems", "0\n")):
            (self.root / "cpuset" / file).write_text(text)
            (made / file).write_text("\n")
        cgroups.join("one", 7, self.root)
        self.assertEqual((made / "cpuset.cpus").read_text(), "0-1\n")
        for name in ("cpuset", "memory"):
            self.assertEqual((self.root / name / "one" / "cgroup.procs").read_text(), "7")

    def test_a_cgroup_is_removed_with_all_below_it_and_those_above_that_are_empty(self) -> None:
        top = self.root / "memory"
        for path in ("vms/one/container", "others/two"):
            (top / path).mkdir(parents=True)
        (top / "cgroup.procs").touch()
        self.assertTrue(cgroups.remove("vms/one", root=self.root))
        self.assertTrue(cgroups.remove("vms/one", root=self.root))
        self.assertEqual(sorted(path.name for path in top.iterdir()), ["cgroup.procs", "others"])

    def test_one_that_is_in_use_stays(self) -> None:
        used = self.root / "memory" / "vms" / "one"
        used.mkdir(parents=True)
        (self.root / "memory" / "cgroup.procs").touch()
        (used / "process").touch()
        self.assertFalse(cgroups.remove("vms/one", root=self.root))
        self.assertTrue(used.exists())
