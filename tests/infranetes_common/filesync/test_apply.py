# SPDX-License-Identifier: Apache-2.0
"""Changes that can't be applied, in part or at all, and those that try to leave the tree."""

from __future__ import annotations

import errno
import os
import subprocess
from typing import Any

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st

from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument, ResourceExhausted
from infranetes_common.filesync import write
from infranetes_common.filesync.apply import Applier
from infranetes_common.filesync.manifest import (
    DIRECTORY,
    FILE,
    SYMLINK,
    Changed,
    Entry,
    Removed,
    Unread,
)
from infranetes_common.filesync.scan import read, scan
from infranetes_common.filesync.tree import Tree
from tests.harness.needs import needs_mounts, needs_root, repetitions
from tests.infranetes_common.filesync.case import BOUNDS, TreeCase


@needs_mounts
class PartTests(TreeCase):
    """One entry can't be written: the others are, and nothing leads to what is not there."""

    def setUp(self) -> None:
        super().setUp()
        self.busy = self.node / "busy"
        self.busy.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", self.busy], check=True)
        self.addCleanup(subprocess.run, ["umount", "-l", str(self.busy)])
        self.applier = Applier(self.ours, BOUNDS)

    def feed_all(self, *changes: Any) -> None:
        self.applier.feed(changes)
        self.applier.finish()

    def test_the_others_are_written_and_the_error_names_the_one(self) -> None:
        self.feed_all(
            Entry(b"a", FILE, 0o600, 0, 0, 1), b"1",
            Entry(b"busy", FILE, 0o600, 0, 0, 2), b"22",
            Entry(b"busy/below", DIRECTORY, 0o700, 0, 0),
            Entry(b"z", FILE, 0o600, 0, 0, 3), b"33", b"3",
            Removed(b"a"), Removed(b"busy"),
        )  # fmt: skip
        self.assertEqual(self.applier.failed, {b"busy": "Device or resource busy"})
        self.assertEqual(sorted(os.listdir(self.node)), ["busy", "z"])
        error = self.assertRaises(FailedPrecondition, self.applier.check_whole)
        self.assertIn("busy: Device or resource busy", str(error))

    def test_a_link_is_not_turned_to_what_failed_and_nothing_goes_then(self) -> None:
        (self.node / "old").write_text("old")
        (self.node / "..data").symlink_to("old")
        (self.node / "other").symlink_to("old")
        self.feed_all(
            Entry(b"busy", FILE, 0o600, 0, 0, 2), b"22",
            Entry(b"..data", SYMLINK, 0o777, 0, 0, target=b"busy"),
            Entry(b"new", SYMLINK, 0o777, 0, 0, target=b"nowhere"),
            Entry(b"other", SYMLINK, 0o777, 0, 0, target=b"new"),
            Removed(b"old"),
        )  # fmt: skip
        self.assertEqual(os.readlink(self.node / "..data"), "old")
        self.assertEqual(os.readlink(self.node / "other"), "new")
        self.assertEqual((self.node / "..data").read_text(), "old")
        self.assertEqual(set(self.applier.failed), {b"busy", b"..data", b"old"})

    def test_which_links_lead_to_what_failed(self) -> None:
        for failed, link, target, leads in (
            (b"busy", b"l", b"busy", True),
            (b"busy", b"l", b"busy/key", True),
            (b"busy", b"l", b"./in/../busy", True),
            (b"busy", b"in/l", b"../busy/key", True),
            (b"gone/key", b"l", b"gone", True),
            (b"busy", b"l", b"busybody", False),
            (b"busy", b"in/l", b"busy", False),
            (b"busy", b"l", b"/busy", False),
            (b"busy", b"l", b"old", False),
        ):
            (self.node / "in").mkdir(exist_ok=True)
            at = self.node / os.fsdecode(link)
            at.unlink(missing_ok=True)
            at.symlink_to("before")
            self.applier = Applier(self.ours, BOUNDS)
            self.feed_all(Entry(failed, FILE, 0o600, 0, 0), Entry(link, SYMLINK, 0o777, 0, 0, target=target))
            self.assertEqual(os.readlink(at), "before" if leads else os.fsdecode(target), (failed, target))

    def test_a_link_that_was_not_there_is_made_and_holds_nothing_back(self) -> None:
        (self.node / "old").touch()
        self.feed_all(
            Entry(b"busy", FILE, 0o600, 0, 0),
            Entry(b"link", SYMLINK, 0o777, 0, 0, target=b"busy/key"),
            Removed(b"old"),
        )
        self.assertEqual(sorted(os.listdir(self.node)), ["busy", "link"])

    def test_an_absolute_link_leads_out_of_the_tree_even_if_its_top_failed(self) -> None:
        def refuse(*_: object) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        (self.node / "link").symlink_to("before")
        self.patch(os, "fchown", refuse)
        link = Entry(b"link", SYMLINK, 0o777, 0, 0, target=b"/after")
        self.feed_all(Entry(b"", DIRECTORY, 0o755, 0, 0), link)
        self.assertEqual(os.readlink(self.node / "link"), "/after")

    def test_the_first_reason_counts(self) -> None:
        self.feed_all(Entry(b"busy", FILE, 0o600, 0, 0), Unread(b"busy"))
        self.assertEqual(self.applier.failed, {b"busy": "Device or resource busy"})

    def test_an_error_without_a_number_is_named_by_its_words(self) -> None:
        def refuse(*_: object) -> None:
            raise OSError("it is odd")

        self.patch(os, "fchown", refuse)
        self.feed_all(Entry(b"a", DIRECTORY, 0o700, 0, 0))
        self.assertEqual(self.applier.failed, {b"a": "it is odd"})

    def test_a_message_names_a_few_of_many(self) -> None:
        def refuse(*_: object) -> int:
            raise OSError(errno.EDQUOT, "quota")

        self.patch(os, "write", refuse)
        for number in range(5):
            self.feed_all(Entry(b"%d" % number, FILE, 0o600, 0, 0, 1), b"x")
        error = self.assertRaises(ResourceExhausted, self.applier.check_whole)
        self.assertTrue(
            str(error).endswith("can't be written whole: 0: quota; 1: quota; 2: quota and 2 more")
        )

    def test_what_is_removed(self) -> None:
        """What is gone already, what is not empty, and what is neither file nor link: no failure."""
        for name in ("empty", "full", "full/in"):
            (self.node / name).mkdir()
        (self.node / "file").touch()
        (self.node / "link").symlink_to("full")
        os.mkfifo(self.node / "pipe")
        names = (b"empty", b"full", b"file", b"link", b"pipe", b"gone", b"gone/too", b"file/below")
        self.feed_all(*map(Removed, names))
        self.assertEqual(self.applier.failed, {})
        self.assertEqual(sorted(os.listdir(self.node)), ["busy", "full", "pipe"])
        self.feed_all(Removed(b"busy"))
        self.assertEqual(self.applier.failed, {b"busy": "Device or resource busy"})

    def test_what_could_not_be_read_stays_as_it_was(self) -> None:
        (self.node / "file").write_text("before")
        self.feed_all(
            Entry(b"file", FILE, 0o600, 0, 0, 600), b"half", Unread(b"file"),
            Unread(b"never begun"),
            Entry(b"z", DIRECTORY, 0o700, 0, 0),
        )  # fmt: skip
        self.assertEqual((self.node / "file").read_text(), "before")
        self.assertEqual(sorted(os.listdir(self.node)), ["busy", "file", "z"])
        self.assertRaises(Changed, self.applier.check_whole)
        self.assertRaises(InvalidArgument, Applier(self.ours, BOUNDS).feed,
                          [Entry(b"file", FILE, 0o600, 0, 0, 6), Unread(b"other")])  # fmt: skip

    def test_a_program_loses_its_set_id_bits_before_another_comes_into_it(self) -> None:
        program = self.node / "program"
        program.write_bytes(b"trusted")
        program.chmod(0o4755)
        tree = Tree(program, file=True, setid=False)
        modes = []
        real = os.pwrite

        def noted(descriptor: int, data: Any, at: int) -> int:
            modes.append(os.fstat(descriptor).st_mode & 0o7777)
            return real(descriptor, data, at)

        self.patch(os, "pwrite", noted)
        self.feed(Entry(b"", FILE, 0o4755, 0, 0, 4), b"evil", tree=tree)
        self.assertEqual((modes, program.stat().st_mode & 0o7777), ([0o755], 0o755))
        program.chmod(0o4755)
        self.feed(Entry(b"", FILE, 0o4755, 0, 0, 4), b"good", tree=Tree(program, file=True, setid=True))
        self.assertEqual((modes[1:], program.stat().st_mode & 0o7777), ([0o4755], 0o4755))


@needs_mounts
class LeftoverTests(TreeCase):
    """Nothing of an entry that was not written stays behind, neither a file nor an open descriptor."""

    def setUp(self) -> None:
        super().setUp()
        self.small = self.node / "small"
        self.small.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", self.small], check=True)
        self.addCleanup(subprocess.run, ["umount", "-l", str(self.small)])
        self.before = len(os.listdir("/proc/self/fd"))

    def feed_all(self, *changes: Any, tree: Tree | None = None) -> Applier:
        applier = Applier(tree or self.ours, BOUNDS)
        applier.feed(changes)
        applier.finish()
        self.assertEqual(len(os.listdir("/proc/self/fd")), self.before)
        return applier

    def test_of_a_file_that_finds_no_room(self) -> None:
        applier = self.feed_all(
            Entry(b"small/big", FILE, 0o600, 0, 0, 600_000), b"1" * 300_000, b"2" * 300_000,
            Entry(b"small/next", FILE, 0o600, 0, 0, 200_000), b"3" * 200_000,
            Entry(b"small", SYMLINK, 0o777, 0, 0, target=b"x"),
        )  # fmt: skip
        self.assertEqual(list(applier.failed), [b"small/big", b"small"])
        error = self.assertRaises(ResourceExhausted, applier.check_whole)
        self.assertIn("small/big: No space left on device; small: ", str(error))
        self.assertEqual(os.listdir(self.small), ["next"])
        self.assertEqual((self.small / "next").stat().st_size, 200_000)

    def test_of_a_single_file_that_finds_no_room(self) -> None:
        self.patch(write, "SPOOL_BYTES", 1000)
        file = self.small / "file"
        file.write_bytes(b"before")
        tree = Tree(file, file=True, setid=False)
        applier = self.feed_all(
            Entry(b"", FILE, 0o600, 0, 0, 600_000), b"1" * 300_000, b"2" * 300_000, tree=tree
        )
        self.assertRaises(ResourceExhausted, applier.check_whole)
        self.assertEqual((os.listdir(self.small), file.read_bytes()), (["file"], b"before"))

    def test_of_what_can_not_take_its_place(self) -> None:
        for entry, content in (
            (Entry(b"small", FILE, 0o600, 0, 0, 1), [b"1"]),
            (Entry(b"small", SYMLINK, 0o777, 0, 0, target=b"x"), []),
        ):
            self.assertEqual(self.feed_all(entry, *content).failed, {b"small": "Device or resource busy"})
            self.assertEqual((os.listdir(self.node), os.listdir(self.small)), (["small"], []))

    def test_what_is_mounted_in_the_place_of_an_entry_keeps_its_files(self) -> None:
        (self.small / "precious").touch()
        (self.node / "above").mkdir()
        (self.node / "above" / "bound").mkdir()
        bound = self.node / "above" / "bound"
        subprocess.run(["mount", "--bind", self.small, bound], check=True)
        self.addCleanup(subprocess.run, ["umount", "-l", str(bound)])
        self.feed_all(
            Entry(b"small", FILE, 0o600, 0, 0, 1), b"1", Entry(b"small", SYMLINK, 0o777, 0, 0, target=b"x"),
            Entry(b"above", FILE, 0o600, 0, 0, 1), b"1",
        )  # fmt: skip
        self.assertEqual(os.listdir(self.small), ["precious"])

    def test_of_what_has_no_directory_any_more(self) -> None:
        applier = self.feed_all(
            Entry(b"gone/a", FILE, 0o600, 0, 0, 2), b"1", b"2",
            Entry(b"gone/b", SYMLINK, 0o777, 0, 0, target=b"x"),
            Entry(b"gone/c", DIRECTORY, 0o700, 0, 0),
            Removed(b"gone/d"),
        )  # fmt: skip
        self.assertEqual(applier.failed, dict.fromkeys([b"gone/a", b"gone/b", b"gone/c"]))
        self.assertRaises(Changed, applier.check_whole)
        self.assertEqual(os.listdir(self.node), ["small"])

    def test_of_a_file_that_changed_while_it_was_sent_or_whose_sender_fell_silent(self) -> None:
        entry = Entry(b"file", FILE, 0o600, 0, 0, 4)
        self.feed_all(entry, b"12", Unread(b"file"))
        applier = Applier(self.ours, BOUNDS)
        applier.feed([entry, b"12"])
        applier.abort()
        self.assertEqual(os.listdir(self.node), ["small"])
        self.assertEqual(len(os.listdir("/proc/self/fd")), self.before)

    def test_of_a_file_whose_owner_can_not_be_set(self) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        self.patch(os, "fchown", refuse)
        self.patch(os, "chown", refuse)
        applier = self.feed_all(
            Entry(b"file", FILE, 0o600, 0, 0, 1), b"1", Entry(b"link", SYMLINK, 0o777, 0, 0, target=b"x")
        )
        self.assertEqual(set(applier.failed), {b"file", b"link"})
        self.assertEqual(os.listdir(self.node), ["small"])


_names = st.sampled_from([b"a", b"b", b"..", b".", b"", b"out", b"/", b"a\0", b"x" * 256])
_paths = st.lists(_names, max_size=4).map(b"/".join) | st.binary(max_size=8)
_entries = st.builds(
    Entry,
    path=_paths,
    kind=st.sampled_from([FILE, DIRECTORY, SYMLINK, "device"]),
    mode=st.integers(0, 0o100000),
    uid=st.just(0),
    gid=st.just(0),
    size=st.integers(0, 4),
    mtime=st.integers(-1, 2**64),
    target=st.sampled_from([b"", b"../out", b"/", b"a", b"\0"]),
)
_changes = _entries | st.builds(Removed, path=_paths) | st.binary(max_size=4)


class HostileTests(TreeCase):
    """The other side says anything."""

    def setUp(self) -> None:
        super().setUp()
        self.outside = self.top / "out"
        self.outside.mkdir()
        (self.outside / "precious").write_bytes(b"precious")

    def unharmed(self) -> None:
        self.assertEqual(sorted(os.listdir(self.top)), ["node", "out", "vm"])
        self.assertEqual(os.listdir(self.outside), ["precious"])
        self.assertEqual((self.outside / "precious").read_bytes(), b"precious")

    @needs_root
    @settings(max_examples=repetitions(40, 300), deadline=None)
    @given(st.lists(_changes, max_size=10))
    def test_no_list_of_changes_leads_out(self, changes: list[Any]) -> None:
        self.fresh()
        applier = Applier(self.ours, BOUNDS)
        for change in changes:
            try:
                applier.feed([change])
            except InfranetesError:
                applier = Applier(self.ours, BOUNDS)
        applier.abort()
        self.unharmed()
        self.assertEqual([name for name in os.listdir(self.node) if name.startswith(".infra")], [])

    @needs_root
    def test_through_a_link_nothing_is_written_removed_or_read(self) -> None:
        out = os.fsencode(self.outside)
        for at in (b"link", b"deep/link"):
            parent = [Entry(b"deep", DIRECTORY, 0o755, 0, 0)]
            link = Entry(at, SYMLINK, 0o777, 0, 0, target=out)
            inner = at + b"/precious"
            file = Entry(inner, FILE, 0o644, 0, 0, 4)
            self.assertRaises(InfranetesError, self.feed, *parent, link, file, b"evil")
            self.assertRaises(InfranetesError, self.feed, Entry(at + b"/d", DIRECTORY, 0o755, 0, 0))
            self.assertRaises(InfranetesError, self.feed, Entry(at + b"/s", SYMLINK, 0, 0, 0, target=b"x"))
            self.assertEqual(os.readlink(self.node / os.fsdecode(at)), str(self.outside))
            self.feed(Removed(inner))
            wanted = attrs.evolve(file, size=8)
            self.assertEqual(list(read(self.ours, [wanted])), [wanted, Unread(inner)])
            self.assertNotIn(inner, scan(self.ours, BOUNDS))
            self.unharmed()

    @needs_root
    def test_a_directory_in_the_place_of_a_link_leaves_what_the_link_led_to(self) -> None:
        self.feed(Entry(b"link", SYMLINK, 0o777, 0, 0, target=os.fsencode(self.outside)))
        self.feed(Entry(b"link", DIRECTORY, 0o700, 0, 0), Entry(b"link/f", FILE, 0o600, 0, 0))
        self.assertTrue((self.node / "link" / "f").is_file())
        self.unharmed()

    def test_paths_that_are_none(self) -> None:
        for path in [*b".. a/../b /etc a//b a/ . a\0b a/.infranetes-1".split(b" "), b"x" * 256, b"a/" * 2048]:
            with self.subTest(path=path[:20]):
                self.assertRaises(InvalidArgument, self.feed, Entry(path, DIRECTORY, 0o755, 0, 0))
                self.assertRaises(InvalidArgument, self.feed, Removed(path))
                self.assertRaises(InvalidArgument, self.feed, Unread(path))
        self.assertRaises(InvalidArgument, self.feed, Removed(b""))

    def test_what_is_not_a_file_in_a_volume_that_is_one(self) -> None:
        (self.node / "file").write_bytes(b"content")
        tree = Tree(self.node / "file", file=True, setid=False)
        for change in (
            Entry(b"", DIRECTORY, 0o755, 0, 0),
            Entry(b"", SYMLINK, 0o777, 0, 0, target=b"x"),
            Entry(b"file", FILE, 0o600, 0, 0),
            Removed(b""),
            Removed(b"file"),
        ):
            self.assertRaises(InvalidArgument, self.feed, change, tree=tree)
        for kind, target in ((FILE, b""), (SYMLINK, b"x")):
            self.assertRaises(InvalidArgument, self.feed, Entry(b"", kind, 0o600, 0, 0, target=target))
        self.assertEqual((self.node / "file").read_bytes(), b"content")

    @needs_root
    def test_a_file_of_the_wrong_length_leaves_nothing(self) -> None:
        entry = Entry(b"file", FILE, 0o600, 0, 0, 4)
        self.assertRaises(InvalidArgument, self.feed, entry, b"abc")
        self.assertRaises(InvalidArgument, self.feed, b"data")
        for content in ([b"abcde"], [b"abc", b"de"], [b"", b"abcde"]):
            applier = Applier(self.ours, BOUNDS)
            self.assertRaises(InvalidArgument, applier.feed, [entry, *content])
        self.assertEqual(os.listdir(self.node), [])
        applier = Applier(self.ours, BOUNDS)
        self.assertRaises(InvalidArgument, applier.feed, [entry, b"abcd", b"e"])
        self.assertEqual((self.node / "file").read_bytes(), b"abcd")
