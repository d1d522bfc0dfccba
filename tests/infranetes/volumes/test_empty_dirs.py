# SPDX-License-Identifier: Apache-2.0
"""kubelet's emptyDirs are recognized: the pod's own, as a whole or in part, and nothing else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.volumes.empty_dirs import EmptyDir, find_empty_dir
from infranetes.volumes.mount_table import MountTable
from infranetes_common.errors import InvalidArgument
from tests.harness.needs import needs_mounts

UID = "5f0c"


@needs_mounts
class EmptyDirTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.table = MountTable()
        self.addCleanup(self.table.close)
        self.pod = Path(os.path.realpath(self.mktemp())) / "pods" / UID
        self.cache = self.make("volumes/kubernetes.io~empty-dir/cache")

    def make(self, path: str) -> Path:
        made = self.pod / path
        made.mkdir(parents=True)
        return made

    def mount(self, *words: str | Path) -> None:
        subprocess.run(["mount", *words], check=True)
        self.addCleanup(subprocess.run, ["umount", "-l", words[-1]], check=True)

    def bind(self, source: Path, index: int = 0, name: str = "cache") -> Path:
        """Make a bind mount as kubelet does for a subPath."""
        at = self.pod / "volume-subpaths" / name / "main" / str(index)
        at.parent.mkdir(parents=True, exist_ok=True)
        at.mkdir() if source.is_dir() else at.write_text("")
        self.mount("--bind", source, at)
        return at

    def find(self, path: Path, uid: str = UID) -> EmptyDir | None:
        return find_empty_dir(str(path), uid, self.table)

    def below(self, path: Path) -> str | None:
        found = self.find(path)
        if found is None:
            return None
        self.assertEqual(found.whole.path, str(self.cache))
        self.assertEqual(found.name, found.whole.id + (f"/{found.below}" if found.below else ""))
        return found.below

    def test_all_of_it(self) -> None:
        found = self.find(self.cache)
        assert found is not None
        self.assertEqual((found.whole.path, found.below), (str(self.cache), ""))
        self.assertEqual(found.name, found.whole.id)

    def test_parts_are_known_by_what_is_mounted(self) -> None:
        (self.cache / "a" / "b c").mkdir(parents=True)
        (self.cache / "a" / "file").write_text("")
        parts = [self.cache / "a", self.cache / "a" / "b c", self.cache / "a" / "file", self.cache]
        found = [self.below(self.bind(part, index)) for index, part in enumerate(parts)]
        self.assertEqual(found, ["a", "a/b c", "a/file", ""])

    def test_a_volume_in_memory_is_one_with_its_parts(self) -> None:
        self.mount("-t", "tmpfs", "-o", "size=8m", "tmpfs", self.cache)
        (self.cache / "a").mkdir()
        found = self.find(self.bind(self.cache / "a"))
        assert found is not None
        self.assertEqual((found.whole.path, found.below), (str(self.cache), "a"))
        self.assertEqual((found.whole.in_memory, found.whole.size_limit), (True, 8 << 20))

    def test_one_of_huge_pages_is_one_with_its_parts(self) -> None:
        self.mount("-t", "hugetlbfs", "-o", "pagesize=2Mi", "nodev", self.cache)
        (self.cache / "a").mkdir()
        for path, below in ((self.cache, ""), (self.bind(self.cache / "a"), "a")):
            found = self.find(path)
            assert found is not None
            self.assertEqual((found.whole.path, found.below), (str(self.cache), below))
            self.assertEqual((found.whole.in_memory, found.whole.huge_page_size), (True, 2 << 20))

    def test_nothing_else_is_one(self) -> None:
        other = self.make("volumes/kubernetes.io~configmap/cache")
        inner = self.make("volumes/kubernetes.io~empty-dir/cache/inner")
        unbound = self.make("volume-subpaths/cache/main/7")
        foreign = self.bind(other, 1)
        beside = self.bind(self.make("volumes/kubernetes.io~empty-dir/cache-2"), 2)
        for path in (other, inner, unbound, foreign, beside, self.pod):
            self.assertIsNone(self.find(path), path)
        for uid in ("", "5f0", "5f0c1"):
            self.assertIsNone(self.find(self.cache, uid))

    def test_a_file_or_a_link_in_the_place_of_one_is_none(self) -> None:
        place = self.cache.parent
        (place / "file").write_text("")
        (place / "link").symlink_to("cache")
        for name in ("file", "link"):
            self.assertIsNone(self.find(place / name), name)

    def test_what_others_mount_in_its_place_is_none_though_it_is_in_memory(self) -> None:
        self.mount("-t", "ramfs", "ramfs", self.cache)
        self.assertIsNone(self.find(self.cache))

    def test_one_with_another_file_system_is_carried(self) -> None:
        inner = self.make("volumes/kubernetes.io~empty-dir/cache/inner")
        elsewhere = self.make("elsewhere")
        covered = self.make("volumes/kubernetes.io~empty-dir/covered")
        self.mount("--bind", elsewhere, covered)
        self.assertIsNone(self.find(covered))
        self.mount("-t", "tmpfs", "tmpfs", inner)
        self.assertIsNone(self.find(self.cache))

    def test_a_part_that_was_removed_on_the_node_is_refused(self) -> None:
        part = self.cache / "a"
        part.mkdir()
        at = self.bind(part)
        part.rmdir()
        error = self.assertRaises(InvalidArgument, self.find, at)
        self.assertIn("subPath", str(error))

    def test_what_it_has_is_below_it_or_bound_for_it(self) -> None:
        found = self.find(self.cache)
        assert found is not None
        bound = self.pod / "volume-subpaths"
        for path in (self.cache, self.cache / "a", bound / "cache" / "main" / "0"):
            self.assertTrue(found.has(str(path)), path)
        for path in (self.cache.with_name("cache-2"), bound / "cache-2" / "main" / "0", self.pod):
            self.assertFalse(found.has(str(path)), path)
