# SPDX-License-Identifier: Apache-2.0
"""Trees that are synced: what is seen, what is sent, and that both sides become the same."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from infranetes_common.errors import FailedPrecondition, ResourceExhausted
from infranetes_common.filesync import scan as scanning
from infranetes_common.filesync.apply import Applier
from infranetes_common.filesync.manifest import (
    Bounds,
    Manifest,
    Removed,
    Unread,
)
from infranetes_common.filesync.plan import plan
from infranetes_common.filesync.scan import read, scan, stable_scan
from infranetes_common.filesync.tree import Tree
from tests.harness.needs import needs_root, repetitions
from tests.infranetes_common.filesync.case import BOUNDS, TreeCase, carry, keys, sync


class SyncTests(TreeCase):
    @needs_root
    def test_modes_owners_times_and_links_are_kept(self) -> None:
        (self.node / "in").mkdir(mode=0o750)
        secret = self.node / "in" / "secret"
        secret.write_bytes(b"x" * 700_000)
        secret.chmod(0o400)
        os.chown(secret, 65534, 7)
        os.utime(secret, ns=(5, 1_234_567_890))
        (self.node / "link").symlink_to("in/secret")
        self.node.chmod(0o2775)
        sync({}, self.ours, self.theirs)
        self.assertEqual(keys(self.ours), keys(self.theirs))
        found = (self.vm / "in" / "secret").stat()
        self.assertEqual((found.st_mode & 0o7777, found.st_uid, found.st_gid), (0o400, 65534, 7))
        self.assertEqual(found.st_mtime_ns, 1_234_567_890)
        self.assertEqual(os.readlink(self.vm / "link"), "in/secret")
        self.assertEqual(self.vm.stat().st_mode & 0o7777, 0o2775)
        self.assertEqual((self.vm / "link").read_bytes(), b"x" * 700_000)

    def test_set_id_bits_go_in_and_never_come_back(self) -> None:
        program = self.node / "program"
        program.write_bytes(b"#!")
        program.chmod(0o4755)
        base = sync({}, self.ours, self.theirs)
        self.assertEqual((self.vm / "program").stat().st_mode & 0o7777, 0o4755)
        evil = self.vm / "evil"
        evil.write_bytes(b"#!")
        evil.chmod(0o6755)
        sync(base, self.ours, self.theirs)
        self.assertEqual((self.node / "evil").stat().st_mode & 0o7777, 0o755)

    def test_sockets_pipes_and_half_written_files_stay_out(self) -> None:
        os.mkfifo(self.node / "pipe")
        listening = socket.socket(socket.AF_UNIX)
        self.addCleanup(listening.close)
        here = os.getcwd()
        os.chdir(self.node)
        self.addCleanup(os.chdir, here)
        listening.bind("socket")
        (self.node / ".infranetes-12").write_bytes(b"")
        self.assertEqual(list(scan(self.ours, BOUNDS)), [b""])

    def test_kubelets_link_turns_when_all_is_there_and_the_old_goes_last(self) -> None:
        self.write_version("one", b"1")
        base = sync({}, self.ours, self.theirs, writable=False)
        self.write_version("two", b"2")
        todo = plan(base, stable_scan(self.ours, BOUNDS), stable_scan(self.theirs, BOUNDS), writable=False)
        applier = Applier(self.theirs, BOUNDS)
        seen = []
        changes = [*read(self.ours, todo.push), *(Removed(path) for path in todo.push_removed)]
        for change in changes:
            applier.feed([change])
            seen.append((self.vm / "key").read_bytes())
        applier.finish()
        self.assertEqual(sorted(set(seen)), [b"1", b"2"])
        self.assertEqual(seen, sorted(seen))
        self.assertEqual(sorted(os.listdir(self.vm)), ["..data", "..two", "key"])

    def write_version(self, name: str, value: bytes) -> None:
        """As kubelet's writer does it."""
        (self.node / f"..{name}").mkdir()
        (self.node / f"..{name}" / "key").write_bytes(value)
        (self.node / "..data_tmp").symlink_to(f"..{name}")
        old = os.readlink(self.node / "..data") if (self.node / "..data").is_symlink() else ""
        (self.node / "..data_tmp").rename(self.node / "..data")
        if not (self.node / "key").is_symlink():
            (self.node / "key").symlink_to("..data/key")
        if old:
            shutil.rmtree(self.node / old)

    def test_a_file_is_written_in_place_so_that_its_mounts_see_it(self) -> None:
        ours, theirs = self.top / "ours", self.top / "theirs"
        ours.write_bytes(b"")
        theirs.write_bytes(b"a longer message")
        inode = ours.stat().st_ino
        node, vm = Tree(ours, file=True, setid=False), Tree(theirs, file=True, setid=True)
        carry(vm, node, list(scan(vm, BOUNDS).values()), [])
        self.assertEqual((ours.read_bytes(), ours.stat().st_ino), (b"a longer message", inode))
        theirs.write_bytes(b"short")
        carry(vm, node, list(scan(vm, BOUNDS).values()), [])
        self.assertEqual(ours.read_bytes(), b"short")

    def test_a_file_that_is_written_meanwhile_is_not_carried(self) -> None:
        (self.node / "file").write_bytes(b"before")
        entry = scan(self.ours, BOUNDS)[b"file"]
        (self.node / "file").write_bytes(b"after!!")
        self.assertEqual(list(read(self.ours, [entry])), [entry, Unread(b"file")])
        os.unlink(self.node / "file")
        self.assertEqual(list(read(self.ours, [entry])), [entry, Unread(b"file")])

    def test_a_file_that_is_written_all_the_time_keeps_no_other_waiting(self) -> None:
        sizes = itertools.count(1)
        real = scanning.scan
        (self.node / "log").write_bytes(b"")
        (self.node / "result").write_bytes(b"42")

        def growing(tree: Tree, bounds: Bounds) -> Manifest:
            (self.node / "log").write_bytes(b"x" * next(sizes))
            return real(tree, bounds)

        self.patch(scanning, "scan", growing)
        found = stable_scan(self.ours, BOUNDS)
        (self.node / "log").write_bytes(b"more and more")
        carry(self.ours, self.theirs, list(found.values()), [])
        self.assertEqual(os.listdir(self.vm), ["result"])

    def test_what_is_gone_or_too_much_says_so(self) -> None:
        (self.node / "one").write_bytes(b"x" * 100)
        self.assertRaises(ResourceExhausted, scan, self.ours, Bounds(0, 1000))
        self.assertRaises(ResourceExhausted, scan, self.ours, Bounds(10, 99))
        gone = Tree(self.top / "gone", file=False, setid=False)
        self.assertRaises(FailedPrecondition, scan, gone, BOUNDS)
        self.assertRaises(ResourceExhausted, Applier(self.theirs, Bounds(10, 99)).feed,
                          read(self.ours, list(scan(self.ours, BOUNDS).values())))  # fmt: skip


_steps = st.tuples(
    st.booleans(),
    st.sampled_from(["file", "dir", "link", "gone"]),
    st.sampled_from(["a", "b", "a/x", "b/y", "a/x/z"]),
    st.binary(max_size=20),
)


class BothSidesTests(TreeCase):
    def test_both_change_and_the_later_one_stays(self) -> None:
        (self.node / "file").write_bytes(b"first")
        base = sync({}, self.ours, self.theirs)
        (self.node / "file").write_bytes(b"of the node")
        (self.vm / "file").write_bytes(b"of the VM")
        os.utime(self.vm / "file", ns=(0, 2**62))
        sync(base, self.ours, self.theirs)
        self.assertEqual((self.node / "file").read_bytes(), b"of the VM")

    def test_nothing_of_a_read_only_volume_comes_back(self) -> None:
        (self.node / "file").write_bytes(b"right")
        base = sync({}, self.ours, self.theirs, writable=False)
        (self.vm / "file").write_bytes(b"wrong")
        (self.vm / "more").write_bytes(b"more")
        sync(base, self.ours, self.theirs, writable=False)
        self.assertEqual(os.listdir(self.node), ["file"])
        self.assertEqual((self.vm / "file").read_bytes(), b"right")
        self.assertEqual(os.listdir(self.vm), ["file"])

    @settings(max_examples=repetitions(20, 60), deadline=None)
    @given(st.lists(_steps, max_size=12))
    def test_whatever_either_side_does_they_agree_in_the_end(self, steps: list[Any]) -> None:
        self.fresh()
        base: Manifest = {}
        for number, (on_node, what, name, data) in enumerate(steps):
            self.do((self.node if on_node else self.vm) / name, what, data)
            if number % 3 == 2:
                base = sync(base, self.ours, self.theirs)
        for _ in range(3):
            base = sync(base, self.ours, self.theirs)
        self.assertEqual(keys(self.ours), keys(self.theirs))
        self.assertEqual(self.contents(self.node), self.contents(self.vm))
        settled = plan(base, scan(self.ours, BOUNDS), scan(self.theirs, BOUNDS), writable=True)
        self.assertFalse(settled.pushes or settled.pulls)

    def do(self, path: Path, what: str, data: bytes) -> None:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            if what == "file":
                path.write_bytes(data)
            elif what == "dir":
                path.mkdir()
            elif what == "link":
                path.symlink_to("a/x")
        except OSError:
            pass

    def contents(self, top: Path) -> dict[str, bytes]:
        return {
            str(path.relative_to(top)): path.read_bytes()
            for path in top.rglob("*")
            if path.is_file() and not path.is_symlink()
        }
