# SPDX-License-Identifier: Apache-2.0
"""How an entry of each kind is written: its content, its status, and what it may take the place of."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infranetes_common.errors import FailedPrecondition, ResourceExhausted
from infranetes_common.filesync import write
from infranetes_common.filesync.apply import Applier
from infranetes_common.filesync.manifest import DIRECTORY, FILE, MAX_DEPTH, SYMLINK, Bounds, Change, Entry
from infranetes_common.filesync.tree import Tree
from tests.harness.needs import needs_root
from tests.infranetes_common.filesync.case import BOUNDS, TreeCase

OLD = 1_234_567_890_000_000_000  # nanoseconds since 1970 UTC


@needs_root
class StatusTests(TreeCase):
    def status(self, name: str) -> tuple[int, int, int]:
        found = (self.node / name).lstat()
        return found.st_mode & 0o7777, found.st_uid, found.st_gid

    def test_each_kind_has_its_owner_and_a_file_and_a_directory_their_mode(self) -> None:
        self.feed(
            Entry(b"", DIRECTORY, 0o700, 1, 2),
            Entry(b"dir", DIRECTORY, 0o750, 3, 4),
            Entry(b"file", FILE, 0o640, 5, 6, 0, OLD),
            Entry(b"link", SYMLINK, 0o777, 7, 8, target=b"dir"),
        )
        self.assertEqual(self.status(""), (0o700, 1, 2))
        self.assertEqual(self.status("dir"), (0o750, 3, 4))
        self.assertEqual(self.status("file"), (0o640, 5, 6))
        self.assertEqual(self.status("link")[1:], (7, 8))
        self.assertEqual((self.node / "file").stat().st_mtime_ns, OLD)
        self.assertGreater((self.node / "dir").stat().st_mtime_ns, OLD, "only a file has a time of its own")

    def test_a_directory_keeps_the_bit_that_gives_files_its_group_and_no_other(self) -> None:
        self.feed(Entry(b"dir", DIRECTORY, 0o7755, 0, 7), Entry(b"file", FILE, 0o7755, 0, 7))
        self.assertEqual((self.status("dir")[0], self.status("file")[0]), (0o3755, 0o1755))
        self.feed(Entry(b"file", FILE, 0o6755, 5, 7), tree=self.theirs)
        self.assertEqual((self.vm / "file").stat().st_mode & 0o7777, 0o6755, "a change of owner clears them")

    def test_nobody_else_reads_a_file_that_is_not_whole(self) -> None:
        self.addCleanup(os.umask, os.umask(0))
        applier = Applier(self.ours, BOUNDS)
        applier.feed([Entry(b"secret", FILE, 0o600, 5, 5, 4), b"12"])
        (name,) = os.listdir(self.node)
        self.assertEqual(self.status(name), (0o600, 0, 0))
        applier.feed([b"34"])
        self.assertEqual(os.listdir(self.node), ["secret"])


@needs_root
class ContentTests(TreeCase):
    """A kernel may take less than it is given."""

    def a_few_at_a_time(self, name: str) -> None:
        real = getattr(os, name)
        self.patch(os, name, lambda file, data, *at: real(file, bytes(data)[:3], *at))

    def test_a_file_is_whole_in_however_many_parts_it_is_taken(self) -> None:
        self.a_few_at_a_time("write")
        self.feed(Entry(b"file", FILE, 0o600, 0, 0, 10), b"1234567", b"890")
        self.assertEqual((self.node / "file").read_bytes(), b"1234567890")

    def test_so_is_one_that_is_written_in_place(self) -> None:
        self.a_few_at_a_time("pwrite")
        self.in_place(b"1234567", b"890")

    def test_one_that_does_not_fit_into_memory_is_spooled_beside_it(self) -> None:
        self.patch(write, "SPOOL_BYTES", 8)
        self.in_place(b"1234567", b"890", b"abcdefghijklmnopqrstuvwxyz", b"!")

    def test_where_files_can_not_be_without_a_name_the_spool_has_one_for_an_instant(self) -> None:
        self.patch(write, "SPOOL_BYTES", 8)
        real = os.open
        for number in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):

            def unsupported(path: Any, flags: int, *rest: Any, number: int = number, **more: Any) -> int:
                if flags & os.O_TMPFILE == os.O_TMPFILE:
                    raise OSError(number, os.strerror(number))
                return real(path, flags, *rest, **more)

            self.patch(os, "open", unsupported)
            self.in_place(b"1234567", b"890", meanwhile=lambda: self.assertEqual(self.names(), ["file"]))

    def names(self) -> list[str]:
        return os.listdir(self.node)

    def in_place(self, *parts: bytes, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Write a file in place, and check that nothing else is there afterwards."""
        path = self.node / "file"
        path.write_bytes(b"a longer content than what comes in its place, by some bytes")
        inode = path.stat().st_ino
        content = b"".join(parts)
        applier = Applier(Tree(path, file=True, setid=False), BOUNDS)
        applier.feed([Entry(b"", FILE, 0o640, 5, 6, len(content), OLD)])
        for part in parts:
            meanwhile()
            self.assertNotEqual(path.read_bytes(), content)
            applier.feed([part])
        applier.finish()
        applier.check_whole()
        found = path.stat()
        self.assertEqual((path.read_bytes(), found.st_ino, self.names()), (content, inode, ["file"]))
        self.assertEqual((found.st_mode & 0o7777, found.st_uid, found.st_gid), (0o640, 5, 6))
        self.assertEqual(found.st_mtime_ns, OLD)


@needs_root
class PlaceTests(TreeCase):
    """What an entry takes the place of goes with all that is in it."""

    def test_any_kind_takes_the_place_of_any(self) -> None:
        outside = self.top / "outside"
        outside.mkdir()
        (outside / "precious").touch()
        entries = (
            Entry(b"it", FILE, 0o600, 0, 0),
            Entry(b"it", SYMLINK, 0o777, 0, 0, target=b"x"),
            Entry(b"it", DIRECTORY, 0o700, 0, 0),
        )
        for before in (self.file, self.pipe, self.tree, lambda path: path.symlink_to(outside)):
            for entry in entries:
                self.fresh()
                before(self.node / "it")
                self.feed(entry)
                if entry.kind != DIRECTORY or before != self.tree:
                    self.assertEqual([path.name for path in self.node.rglob("*")], ["it"])
                self.assertEqual((self.node / "it").is_symlink(), entry.kind == SYMLINK)
                self.assertEqual((self.node / "it").is_dir(), entry.kind == DIRECTORY)
        self.assertEqual(os.listdir(outside), ["precious"])

    def file(self, path: Path) -> None:
        path.write_bytes(b"before")

    def pipe(self, path: Path) -> None:
        os.mkfifo(path)

    def tree(self, path: Path) -> None:
        deep = path.joinpath(*["d"] * MAX_DEPTH)
        deep.mkdir(parents=True)
        (deep / "file").touch()
        (path / "link").symlink_to("..")

    def test_a_single_file_that_is_none_any_more_is_left_alone(self) -> None:
        path = self.node / "file"
        os.mkfifo(path)
        self.addCleanup(os.close, os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        tree = Tree(path, file=True, setid=False)
        with self.assertRaisesRegex(FailedPrecondition, "is no file any more"):
            self.feed(Entry(b"", FILE, 0o600, 5, 5, 1), b"x", tree=tree)
        self.assertEqual(path.stat().st_uid, 0)


class BoundTests(TreeCase):
    def test_as_many_entries_and_bytes_as_the_bounds_say(self) -> None:
        for bounds, fits in ((Bounds(2, 5), True), (Bounds(1, 5), False), (Bounds(2, 4), False)):
            applier = Applier(self.ours, bounds)
            changes: list[Change] = [
                Entry(b"a", FILE, 0o600, 0, 0, 3), b"123", Entry(b"b", FILE, 0o600, 0, 0, 2), b"45",
            ]  # fmt: skip
            if fits:
                applier.feed(changes)
            else:
                self.assertRaises(ResourceExhausted, applier.feed, changes)
