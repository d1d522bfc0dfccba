# SPDX-License-Identifier: Apache-2.0
"""The guest image that an image brings, how many pods a removal would end, and whole trees."""

from __future__ import annotations

import gzip
import os
import sqlite3
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.installer.__main__ import running_pods
from infranetes.installer.node import Files
from infranetes.installer.trees import Trees
from infranetes.pods.store.states import SandboxState
from infranetes.pods.store.store import FILE
from infranetes_common.errors import FailedPrecondition
from tests.infranetes.installer.system import tree


class TreesCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.patch(os, "sync", lambda: None)
        top = Path(self.mktemp()).absolute()
        self.root = top / "node"
        (self.root / "opt/infranetes").mkdir(parents=True)
        (self.root / "var/lib").mkdir(parents=True)
        self.guest = top / "guest"
        self.trees = Trees(Files(self.root), tree(top, "0.2.0-aaaa"), self.guest, set)


class BringTests(TreesCase):
    def test_modules_are_compiled_for_where_they_will_be(self) -> None:
        self.trees.bring()
        home = self.root / "opt/infranetes/0.2.0-aaaa"
        (compiled,) = (home / "usr/lib/__pycache__").iterdir()
        self.assertIn(b"/opt/infranetes/0.2.0-aaaa/usr/lib/module.py", compiled.read_bytes())

    def test_what_a_killed_copy_has_left_is_made_anew(self) -> None:
        partial = self.root / "opt/infranetes/.0.2.0-aaaa.partial"
        partial.mkdir()
        (partial / "half").touch()
        self.trees.bring()
        self.assertFalse((self.root / "opt/infranetes/0.2.0-aaaa/half").exists())
        self.assertFalse(partial.exists())

    def test_a_directory_with_no_releases_name_is_no_tree(self) -> None:
        self.assertRaises(FailedPrecondition, Trees, Files(self.root), Path("/"), self.guest, set)


class GuestImageTests(TreesCase):
    def test_none_in_the_image_leaves_the_nodes(self) -> None:
        self.trees.bring_guest_image()
        self.assertFalse((self.root / "var/lib/infranetes").exists())

    def test_its_disk_is_unpacked_with_its_holes_and_in_use(self) -> None:
        image = self.guest / "abc"
        image.mkdir(parents=True)
        disk = bytearray(16 << 20)
        disk[10 << 20 : (10 << 20) + 4] = b"data"
        (image / "disk.raw.gz").write_bytes(gzip.compress(disk, 1))
        (image / "manifest.json").write_text("{}")
        self.trees.bring_guest_image()
        self.trees.bring_guest_image()
        images = self.root / "var/lib/infranetes/guest"
        self.assertEqual((images / "current").readlink(), Path("abc"))
        copy = images / "abc/disk.raw"
        self.assertEqual(copy.stat().st_size, 16 << 20)
        self.assertLess(copy.stat().st_blocks * 512, 4 << 20)
        self.assertEqual(copy.read_bytes(), disk)
        self.assertEqual({path.name for path in copy.parent.iterdir()}, {"disk.raw", "manifest.json"})
        self.assertEqual({path.name for path in images.iterdir()}, {"abc", "current"})


class PodsTests(TreesCase):
    def test_pods_with_vms_are_counted_by_the_daemons_records(self) -> None:
        files = Files(self.root)
        self.assertEqual(running_pods(files), 0)
        path = self.root / "var/lib/infranetes" / FILE
        path.parent.mkdir(parents=True)
        with sqlite3.connect(path) as connection:
            self.assertEqual(running_pods(files), 0)  # before its first start has come far
            connection.execute("CREATE TABLE sandboxes (state TEXT)")
            states = [(state.value,) for state in SandboxState]
            connection.executemany("INSERT INTO sandboxes VALUES (?)", states)
        connection.close()
        self.assertEqual(running_pods(files), len(SandboxState) - 2)  # without STOPPED and LOST
