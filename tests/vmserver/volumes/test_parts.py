# SPDX-License-Identifier: Apache-2.0
"""What containers mount from a volume: bound to a place of its own, never led outside by a link."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.filesync.wire import PREFIX
from tests.harness.needs import needs_mounts
from vmserver.machine.mounts import mounts_below
from vmserver.volumes.parts import VolumeParts
from vmserver.volumes.store import VolumeStore


@needs_mounts
class PartTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.top = Path(os.path.realpath(self.mktemp()))
        self.top.mkdir()
        store = VolumeStore(self.top / "disk", self.top / "memory", mount=True)
        store.make("v", file=False, in_memory=False)
        self.volume = store.path("v")
        self.volume.chmod(0o2777)
        self.parts = VolumeParts(store, self.top / "parts", mount=True)
        self.addCleanup(self.unmount)

    def unmount(self) -> None:
        for one in reversed(mounts_below(self.top)):
            subprocess.run(["umount", "-l", one.point], check=True)

    def place(self, below: str = "", index: int = 0, container: str = "c") -> Path:
        return Path(self.parts.place(container, index, f"{PREFIX}v{below}"))

    def test_all_of_a_volume_is_where_it_is_and_other_paths_are_left_alone(self) -> None:
        self.assertEqual(self.place(), self.volume)
        self.assertEqual(self.parts.place("c", 0, "/dev/fuse"), "/dev/fuse")
        self.assertFalse((self.top / "parts").exists())

    def test_a_part_is_the_same_files_as_the_volume(self) -> None:
        (self.volume / "config").write_text("first")
        part, file = self.place("/a/b"), self.place("/config", 1)
        (part / "new").write_text("x")
        self.assertEqual((self.volume / "a" / "b" / "new").read_text(), "x")
        self.assertEqual((self.volume / "a").stat().st_mode & 0o7777, 0o2777)
        (self.volume / "config").write_text("second")
        self.assertEqual(file.read_text(), "second")
        self.assertEqual(self.place("/a/b"), part)  # the same when repeated
        self.assertEqual(len(mounts_below(self.top)), 2)

    def test_a_place_is_gone_with_its_container_and_the_files_are_not(self) -> None:
        (self.volume / "config").write_text("first")
        for index, below in enumerate(("/a", "/config")):
            self.place(below, index)
        other = self.place("/a", container="d")
        (other / "file").write_text("")
        for _ in range(2):
            self.parts.release("c")
        self.assertEqual(os.listdir(self.top / "parts"), ["d"])
        self.assertEqual(sorted(os.listdir(self.volume)), ["a", "config"])
        self.assertTrue((self.volume / "a" / "file").exists())

    def test_links_lead_where_they_may(self) -> None:
        (self.volume / "data").mkdir()
        (self.volume / "inner").symlink_to("data")
        (self.volume / "up").symlink_to("../..")
        (self.volume / "root").symlink_to("/")
        (self.volume / "loop").symlink_to("loop")
        (self.place("/inner") / "file").write_text("")
        self.assertTrue((self.volume / "data" / "file").exists())
        for below in ("/up", "/up/x", "/root/etc", "/loop"):
            error = self.assertRaises(InvalidArgument, self.place, below, 1)
            self.assertIn(f"subPath {below[1:]!r} of volume v", str(error))
        for below in ("/..", "/a/../b", "/a//b", "/./a"):
            self.assertRaises(InvalidArgument, self.place, below, 1)
        self.assertEqual([one.point for one in mounts_below(self.top)], [str(self.top / "parts" / "c" / "0")])

    def test_a_link_that_comes_later_changes_nothing_for_who_has_the_part(self) -> None:
        part = self.place("/a")
        (self.volume / "a").rmdir()
        (self.volume / "a").symlink_to("/etc")
        self.assertEqual(os.listdir(part), [])

    def test_a_file_on_the_way_is_named(self) -> None:
        (self.volume / "config").write_text("")
        error = self.assertRaises(FailedPrecondition, self.place, "/config/x")
        self.assertIn("a file of the volume is on the way", str(error))
        self.assertRaises(InvalidArgument, self.parts.place, "c", 0, f"{PREFIX}w/a")

    def test_a_container_that_is_the_vm_has_the_path_itself(self) -> None:
        path = self.parts.place("c", 0, f"{PREFIX}v/a", bind=False)
        self.assertEqual(path, str(self.volume / "a"))
        self.assertEqual(mounts_below(self.top), [])
