# SPDX-License-Identifier: Apache-2.0
"""What kubelet finds in an emptyDir's directory is as much as its VM has of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from twisted.trial.unittest import SynchronousTestCase

from infranetes.volumes import space
from infranetes.volumes.space import NAME, STEP, thd_show

MIB = 1 << 20


class Disk(NamedTuple):
    """What fstatvfs says."""

    f_blocks: int
    f_bavail: int
    f_frsize: int = MIB


class SpaceTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.top = Path(os.path.realpath(self.mktemp()))
        self.top.mkdir()
        self.file = self.top / os.fsdecode(NAME)
        self.disk(Disk(1000, 900))

    def disk(self, disk: Disk) -> None:
        self.patch(space.os, "fstatvfs", lambda _: disk)

    def show(self, size: int) -> str:
        return thd_show(str(self.top), size)

    def shown(self) -> int:
        """As kubelet adds it up."""
        return sum(os.lstat(self.top / name).st_blocks * 512 for name in os.listdir(self.top))

    def test_it_grows_and_shrinks_by_whole_steps(self) -> None:
        for size in (8 * MIB, 3 * MIB, 20 * MIB):
            self.assertEqual(self.show(size), "")
            self.assertAlmostEqual(self.shown(), size, delta=STEP / 2)
        self.show(20 * MIB + STEP // 2)
        self.assertAlmostEqual(self.shown(), 20 * MIB, delta=STEP / 4)

    def test_little_is_shown_by_no_file(self) -> None:
        self.show(STEP - 1)
        self.assertEqual(os.listdir(self.top), [])
        self.show(8 * MIB)
        self.show(0)
        self.assertEqual(os.listdir(self.top), [])

    def test_it_gives_way_before_the_nodes_disk_is_full(self) -> None:
        self.disk(Disk(1000, 205))
        self.assertEqual(self.show(30 * MIB), "the node's disk has to keep 20% free")
        self.assertAlmostEqual(self.shown(), 5 * MIB, delta=STEP / 2)
        self.disk(Disk(1000, 198))
        self.show(30 * MIB)
        self.assertAlmostEqual(self.shown(), 3 * MIB, delta=STEP / 2)
        self.disk(Disk(1000, 900))
        self.assertEqual(self.show(30 * MIB), "")

    def test_nothing_is_made_where_the_directory_is_gone(self) -> None:
        self.top.rmdir()
        self.assertEqual(self.show(8 * MIB), "")
        self.assertFalse(self.top.exists())

    def test_somebody_elses_file_is_left_alone(self) -> None:
        other = self.top.with_name(f"{self.top.name}-other")
        other.write_text("text")
        self.file.symlink_to(other)
        self.assertRaises(OSError, self.show, 8 * MIB)
        self.file.unlink()
        os.link(other, self.file)
        self.assertRaises(OSError, self.show, 8 * MIB)
        self.assertEqual(other.read_text(), "text")
