# SPDX-License-Identifier: Apache-2.0
"""What a scan finds, where its bounds are, and what the reading of a file says if the file changes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

from infranetes_common.errors import FailedPrecondition, ResourceExhausted
from infranetes_common.filesync import scan as scanning
from infranetes_common.filesync.manifest import (
    DIRECTORY,
    MAX_DEPTH,
    TEMPORARY,
    Bounds,
    Changed,
    Manifest,
    Unread,
)
from infranetes_common.filesync.scan import CHUNK_BYTES, read, scan, stable_scan
from infranetes_common.filesync.tree import Tree
from tests.harness.needs import needs_mounts, needs_root
from tests.infranetes_common.filesync.case import BOUNDS, TreeCase, sync


class ScanCase(TreeCase):
    def found(self, bounds: Bounds = BOUNDS) -> list[bytes]:
        """Return the paths that a scan finds below the top."""
        return list(scan(self.ours, bounds))[1:]

    def never_waiting(self) -> None:
        """Fail the test, rather than wait for ever, if a pipe is opened in a way that waits."""

        def late(*_: object) -> None:
            raise AssertionError("it waits for the other end of a pipe")

        before = signal.signal(signal.SIGALRM, late)
        self.addCleanup(signal.signal, signal.SIGALRM, before)
        self.addCleanup(signal.alarm, 0)
        signal.alarm(10)


class ScanTests(ScanCase):
    def test_progress_is_told_with_each_entry(self) -> None:
        (self.node / "in").mkdir()
        for name in ("a", "in/b", "in/c"):
            (self.node / name).touch()
        told: list[None] = []
        scan(Tree(self.node, file=False, setid=False, alive=lambda: told.append(None)), BOUNDS)
        self.assertEqual(len(told), 4)

    def test_what_is_half_written_is_passed_over_and_nothing_else(self) -> None:
        for name in (TEMPORARY + b"1", b".hidden", b"a", b"zz", TEMPORARY[:-1]):
            (self.node / os.fsdecode(name)).touch()
        self.assertEqual(sorted(self.found()), sorted((b".hidden", b"a", b"zz", TEMPORARY[:-1])))

    def test_as_many_entries_bytes_directories_and_as_long_a_path_as_the_bounds_say(self) -> None:
        (self.node / "file").write_bytes(b"12345")
        self.assertEqual(self.found(Bounds(1, 5)), [b"file"])
        self.assertRaises(ResourceExhausted, self.found, Bounds(0, 5))
        self.assertRaises(ResourceExhausted, self.found, Bounds(1, 4))
        (self.node / "more").write_bytes(b"6")
        self.assertRaises(ResourceExhausted, self.found, Bounds(2, 5))
        self.patch(scanning, "MAX_PATH", 10)
        (self.node / ("x" * 10)).touch()
        self.assertIn(b"x" * 10, self.found())
        (self.node / ("x" * 11)).touch()
        self.assertRaises(ResourceExhausted, self.found)

    def test_as_deep_as_paths_may_be(self) -> None:
        deep = "/".join(["d"] * (MAX_DEPTH - 1))
        (self.node / deep).mkdir(parents=True)
        (self.node / deep / "file").touch()
        self.assertIn(os.fsencode(f"{deep}/file"), self.found())
        (self.node / deep / "d").mkdir()
        self.assertRaises(ResourceExhausted, self.found)

    def test_a_single_file_has_bounds_too_and_must_still_be_one(self) -> None:
        self.never_waiting()
        path = self.top / "file"
        path.write_bytes(b"12345")
        file = Tree(path, file=True, setid=False)
        self.assertEqual(scan(file, Bounds(1, 5))[b""].size, 5)
        self.assertRaises(ResourceExhausted, scan, file, Bounds(1, 4))
        for make in (os.mkdir, os.mkfifo):
            path.unlink()
            make(path)
            self.assertRaises(FailedPrecondition, scan, file, BOUNDS)
            path.rename(self.top / make.__name__)
            path.touch()

    def test_what_goes_or_can_not_be_opened_meanwhile_is_left_out(self) -> None:
        for name in ("a", "b", "c"):
            (self.node / name).mkdir()
        real = os.open
        for number in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.ENOTCONN, errno.EINVAL):

            def fails(path: Any, *rest: Any, number: int = number, **more: Any) -> int:
                if path == "b":
                    raise OSError(number, os.strerror(number))
                return real(path, *rest, **more)

            self.patch(os, "open", fails)
            self.assertEqual(self.found(), [b"a", b"c"], errno.errorcode[number])

    def test_an_error_of_the_disk_is_one_of_the_scan(self) -> None:
        (self.node / "b").mkdir()
        real = os.open

        def fails(path: Any, *rest: Any, **more: Any) -> int:
            if path == "b":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(path, *rest, **more)

        self.patch(os, "open", fails)
        self.assertRaises(OSError, self.found)

    @needs_mounts
    def test_what_is_mounted_below_belongs_to_it_or_is_an_empty_directory(self) -> None:
        mounted = self.node / "mounted"
        mounted.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", mounted], check=True)
        self.addCleanup(subprocess.run, ["umount", "-l", str(mounted)])
        (mounted / "inner").touch()
        self.assertEqual(self.found(), [b"mounted", b"mounted/inner"])
        self.ours = Tree(self.node, file=False, setid=False, crossing=False)
        self.assertEqual(self.found(), [b"mounted"])

    def test_nothing_stays_open(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        (self.node / "in" / "deep").mkdir(parents=True)
        (self.node / "in" / "deep" / "file").write_bytes(b"content")
        (self.node / "link").symlink_to("in")
        base = sync({}, self.ours, self.theirs)
        (self.vm / "in" / "deep" / "file").unlink()
        (self.vm / "in" / "deep").rmdir()
        sync(base, self.ours, self.theirs)
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)


class StableScanTests(ScanCase):
    """Scans until two in a row agree."""

    def scans(self, *before_each: Callable[[], object]) -> Manifest:
        """Return what `stable_scan` finds if something happens before each of its first scans."""
        real = scanning.scan
        todo: Iterator[Callable[[], object]] = iter(before_each)

        def scan(tree: Tree, bounds: Bounds) -> Manifest:
            next(todo, lambda: None)()
            return real(tree, bounds)

        self.patch(scanning, "scan", scan)
        try:
            return stable_scan(self.ours, BOUNDS)
        finally:
            self.patch(scanning, "scan", real)

    def write(self, name: str, size: int) -> Callable[[], object]:
        return lambda: (self.node / name).write_bytes(b"x" * size)

    def test_of_what_does_not_change_two_are_enough(self) -> None:
        scans = list[int]()
        self.scans(*[lambda: scans.append(1)] * 20)
        self.assertEqual(len(scans), 2)

    def test_a_file_that_is_being_written_is_waited_for(self) -> None:
        found = self.scans(*(self.write("a", size) for size in (1, 2, 3)))
        self.assertEqual(found[b"a"].size, 3)

    def test_what_has_come_meanwhile_is_compared_with_the_scan_before_and_not_with_the_first(self) -> None:
        found = self.scans(lambda: None, self.write("a", 1))
        self.assertEqual(list(found), [b"", b"a"])

    def test_names_that_change_all_the_time_are_no_state(self) -> None:
        self.assertRaises(Changed, self.scans, *(self.write(f"a{number}", 1) for number in range(20)))

    def test_links_that_are_turned_all_the_time_are_no_state(self) -> None:
        def turn(number: int) -> Callable[[], object]:
            def work() -> None:
                (self.node / "link").unlink(missing_ok=True)
                (self.node / "link").symlink_to(f"{number}")

            return work

        self.assertRaises(Changed, self.scans, *map(turn, range(20)))


class ReadTests(ScanCase):
    """A file that changes while it is read ends with `Unread`, and is never longer than it was."""

    def setUp(self) -> None:
        super().setUp()
        self.file = self.node / "file"
        self.file.write_bytes(b"12345678")
        self.patch(scanning, "CHUNK_BYTES", 5)
        self.entry = scan(self.ours, BOUNDS)[b"file"]

    def changed(self, after: int, change: Callable[[], object]) -> list[object]:
        """Return what is read if something happens after so many changes."""
        found: list[object] = []
        for number, each in enumerate(read(self.ours, [self.entry]), 1):
            found.append(each)
            if number == after:
                change()
        return found

    def test_what_does_not_change_comes_in_chunks(self) -> None:
        self.assertEqual(self.changed(9, lambda: None), [self.entry, b"12345", b"678"])
        self.assertLessEqual(CHUNK_BYTES, 512 * 1024, "each fits into a message")

    @needs_root
    def test_one_that_changes_before_its_last_chunk_is_sent(self) -> None:
        for after, read_already in ((1, []), (2, [b"12345"])):
            for change in (
                lambda: self.file.write_bytes(b"abcdefgh"),
                lambda: self.file.write_bytes(b"123"),
                lambda: self.file.write_bytes(b"1234567890"),
                lambda: os.chown(self.file, 1, 1),
            ):
                self.file.write_bytes(b"12345678")
                os.chown(self.file, 0, 0)
                os.utime(self.file, ns=(1, 1))
                self.entry = scan(self.ours, BOUNDS)[b"file"]
                found = self.changed(after, change)
                self.assertEqual(found, [self.entry, *read_already, Unread(b"file")])

    def test_one_that_is_something_else_now(self) -> None:
        self.never_waiting()
        for make in (os.mkdir, os.mkfifo, lambda path: os.symlink("elsewhere", path)):
            self.file.rename(self.top / "away")
            make(self.file)
            self.assertEqual(self.changed(9, lambda: None), [self.entry, Unread(b"file")])
            self.file.rename(self.top / f"{make.__name__}-away")
            (self.top / "away").rename(self.file)

    def test_an_error_of_the_disk_while_it_is_read(self) -> None:
        class Failing:
            """A file that can't be read."""

            def __enter__(self) -> Failing:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def read(self, size: int) -> bytes:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        real = os.fdopen

        def fdopen(descriptor: int, *rest: Any, **more: Any) -> Any:
            self.addCleanup(real(descriptor, *rest, **more).close)
            return Failing()

        self.patch(os, "fdopen", fdopen)
        (self.node / "next").mkdir()
        after = scan(self.ours, BOUNDS)[b"next"]
        self.assertEqual(list(read(self.ours, [self.entry, after])), [self.entry, Unread(b"file"), after])
        self.assertEqual(after.kind, DIRECTORY)
