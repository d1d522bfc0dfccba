# SPDX-License-Identifier: Apache-2.0
"""The locations of a directory's content, according to the kernel's mount table."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.volumes.mount_table import (
    Location,
    Mount,
    MountTable,
    changed_paths,
    layout,
    parse,
    with_previous,
)
from infranetes_common.filesync.manifest import DIRECTORY, FILE, Entry, Manifest
from tests.harness.needs import needs_mounts

POINTS = (b"/", b"/v", b"/v/a", b"/v/a/b")
DISK = Mount(98, 1, b"/", "253:0", b"/", "ext4")


def mount(id: int, parent: int, at: bytes, device: str, root: bytes = b"/") -> Mount:
    return Mount(id, parent, at, device, root, "xfs")


class TableTests(SynchronousTestCase):
    def test_lines_as_the_manual_has_them(self) -> None:
        table = (
            b"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n"
            b"37 36 0:5 / /with\\040space\\134 nosuid,ro - tmpfs none rw\n"
        )
        self.assertEqual(
            parse(table),
            [
                Mount(
                    *(36, 35, b"/mnt2", "98:0", b"/mnt1", "ext3"),
                    source=b"/dev/root",
                    slave=True,
                    options=b"rw,noatime",
                    super_options=b"rw,errors=continue",
                ),
                Mount(
                    *(37, 36, b"/with space\\", "0:5", b"/", "tmpfs"),
                    writable=False,
                    source=b"none",
                    options=b"nosuid,ro",
                    super_options=b"rw",
                ),
            ],
        )

    def test_a_name_may_have_what_ends_a_line_elsewhere(self) -> None:
        """kubelet binds a subPath, whose name a pod chooses, and the kernel escapes only some characters."""
        for name in (b"a\rb", b"a\vb", b"a\x85b", b"-"):
            first = b"36 35 98:0 /%s /at/%s rw - ext4 /dev/vda rw\n" % (name, name)
            found = parse(first + b"37 36 0:5 / /next rw - tmpfs none rw\n")
            self.assertEqual([one.mount_point for one in found], [b"/at/" + name, b"/next"])
            self.assertEqual(found[0].root, b"/" + name)

    def test_a_directory_is_where_the_mount_above_it_says(self) -> None:
        mounts = [mount(22, 98, b"/srv", "8:1", b"/export"), DISK]  # "/" comes last after an initrd
        self.assertEqual(layout(mounts, b"/srv/a"), {b"": Location("8:1", b"/export/a")})
        self.assertEqual(layout(mounts, b"/srv"), {b"": Location("8:1", b"/export")})
        self.assertEqual(layout(mounts, b"/srvother"), {b"": Location("253:0", b"/srvother")})

    def test_what_is_mounted_below_has_its_own_location_however_deep(self) -> None:
        mounts = [
            DISK,
            mount(2, 98, b"/v/a", "8:1"),
            mount(3, 2, b"/v/a/b", "8:2", b"/x"),
            mount(4, 98, b"/w", "8:3"),
        ]
        self.assertEqual(
            layout(mounts, b"/v"),
            {b"": Location("253:0", b"/v"), b"a": Location("8:1", b"/"), b"a/b": Location("8:2", b"/x")},
        )
        self.assertEqual(set(layout(mounts, b"/")), {b"", b"v/a", b"v/a/b", b"w"})

    def test_of_a_stack_the_topmost_counts_and_what_a_later_mount_hides_does_not(self) -> None:
        stacked = [DISK, mount(2, 98, b"/v", "8:1"), mount(3, 2, b"/v", "8:2"), mount(4, 3, b"/v/a", "8:3")]
        self.assertEqual(layout(stacked, b"/v"), {b"": Location("8:2", b"/"), b"a": Location("8:3", b"/")})
        hiding = [DISK, mount(2, 98, b"/v/a/b", "8:1"), mount(3, 98, b"/v/a", "8:2")]
        self.assertEqual(layout(hiding, b"/v"), {b"": Location("253:0", b"/v"), b"a": Location("8:2", b"/")})

    def test_a_directory_that_is_mounted_onto_itself_is_where_it_was(self) -> None:
        """systemd does this for a unit with ReadOnlyPaths."""
        plain = layout([DISK], b"/v")
        self.assertEqual(layout([DISK, mount(2, 98, b"/v/a", "253:0", b"/v/a")], b"/v"), plain)
        self.assertEqual(layout([DISK, mount(2, 98, b"/v", "253:0", b"/v")], b"/v"), plain)

    def test_a_root_that_is_no_mount_point(self) -> None:
        mounts = [mount(5, 98, b"/v/a", "8:1")]
        self.assertEqual(set(layout(mounts, b"/v")), {b"", b"a"})

    @given(
        st.lists(
            st.builds(mount, st.integers(0, 6), st.integers(0, 6), st.sampled_from(POINTS), st.just("8:1")),
            max_size=8,
        )
    )
    def test_a_table_that_was_read_while_it_changed_has_an_end(self, mounts: list[Mount]) -> None:
        self.assertIn(b"", layout(mounts, b"/v"))


class ChangeTests(SynchronousTestCase):
    def test_mounted_unmounted_and_exchanged(self) -> None:
        old, new = Location("8:1", b"/"), Location("8:2", b"/")
        self.assertEqual(changed_paths({b"": old, b"a": old}, {b"": old, b"a": old}), set())
        self.assertEqual(
            changed_paths({b"": old, b"gone": old, b"other": old}, {b"": old, b"come": new, b"other": new}),
            {b"gone", b"come", b"other"},
        )

    def test_what_is_at_and_below_them_stays_as_it_was(self) -> None:
        def tree(size: int, *paths: bytes) -> Manifest:
            entries = [Entry(b"", DIRECTORY, 0o755, 0, 0)]
            entries += [Entry(path, FILE, 0o644, 0, 0, size) for path in paths]
            return {entry.path: entry for entry in entries}

        now, before = tree(1, b"a", b"a/new", b"ab", b"c"), tree(2, b"a", b"a/old", b"c")
        self.assertEqual(with_previous(now, before, frozenset()), now)
        mixed = with_previous(now, before, frozenset([b"a"]))
        self.assertEqual(
            {path: entry.size for path, entry in mixed.items()},
            {b"": 0, b"a": 2, b"a/old": 2, b"ab": 1, b"c": 1},
        )
        self.assertEqual(with_previous(now, before, frozenset([b"", b"a"])), before)


@needs_mounts
class KernelTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.top = Path(os.path.realpath(self.mktemp()))
        for name in ("v/a b", "other"):
            (self.top / name).mkdir(parents=True)
        self.table = MountTable()
        self.addCleanup(self.table.close)

    def bind(self, source: str, target: str) -> None:
        subprocess.run(["mount", "--bind", self.top / source, self.top / target], check=True)
        self.addCleanup(self.unmount, target)

    def unmount(self, target: str) -> None:
        subprocess.run(["umount", "-l", self.top / target], stderr=subprocess.DEVNULL)

    def test_a_mount_is_seen_when_it_is_made_and_when_it_is_gone(self) -> None:
        path = str(self.top / "v")
        before = self.table.layout(path)
        self.assertEqual(set(before), {b""})
        self.bind("other", "v/a b")
        there = self.table.layout(path)
        self.assertEqual(set(there), {b"", b"a b"})
        self.assertEqual(there[b"a b"], self.table.layout(str(self.top / "other"))[b""])
        subprocess.run(["umount", self.top / "v/a b"], check=True)
        self.assertEqual(self.table.layout(path), before)

    def test_a_file_system_is_known_by_its_number_while_it_is_mounted(self) -> None:
        at = self.top / "v"
        self.table.mounts()
        self.addCleanup(self.unmount, "v")
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", at], check=True)
        number = os.stat(at).st_dev
        self.assertEqual(self.table.fs_type(number), "tmpfs")
        subprocess.run(["umount", at], check=True)
        self.assertEqual(self.table.fs_type(number), "")

    def test_closed_it_still_answers(self) -> None:
        path = str(self.top / "v")
        before = self.table.layout(path)
        self.table.close()
        self.table.close()
        self.bind("other", "v")
        self.assertEqual(changed_paths(before, self.table.layout(path)), {b""})

    def test_a_namespace_made_later_has_the_same_layout(self) -> None:
        self.bind("other", "v/a b")
        path = self.top / "v"
        table = subprocess.run(
            ["unshare", "--mount", "cat", "/proc/self/mountinfo"], check=True, capture_output=True
        ).stdout
        self.assertEqual(layout(parse(table), os.fsencode(path)), self.table.layout(str(path)))
