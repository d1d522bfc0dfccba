"""Carrying a tree: what is seen, what changes, and that nothing leads out of it."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import Any

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.applier import Applier
from infranetes_common.entries import DIRECTORY, FILE, SYMLINK, Bounds, Changed, Entry, Manifest, Removed
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument, ResourceExhausted
from infranetes_common.tree import Tree
from infranetes_common.volumes import change_from_wire, change_to_wire, plan

BOUNDS = Bounds(1000, 1_000_000)


def carry(source: Tree, target: Tree, entries: list[Entry], removed: list[bytes]) -> None:
    """One side's changes to the other, as they go over the wire."""
    applier = Applier(target, BOUNDS)
    for change in source.read(entries):
        applier.feed([change_from_wire(change_to_wire(change))])
    applier.feed([Removed(path) for path in removed])
    applier.finish()


def sync(base: Manifest, node: Tree, vm: Tree, *, writable: bool = True) -> Manifest:
    """What both have afterwards."""
    todo = plan(base, node.stable(BOUNDS), vm.stable(BOUNDS), writable=writable)
    carry(vm, node, todo.pull, todo.pull_removed)
    carry(node, vm, todo.push, todo.push_removed)
    return node.scan(BOUNDS)


def keys(tree: Tree) -> dict[bytes, Any]:
    return {path: entry.key for path, entry in tree.scan(BOUNDS).items()}


class TreeCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.top = Path(os.path.abspath(self.mktemp()))
        self.top.mkdir()
        self.node, self.vm = self.top / "node", self.top / "vm"
        self.fresh()

    def fresh(self) -> None:
        for path in (self.node, self.vm):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        self.ours = Tree(self.node, file=False, setid=False)
        self.theirs = Tree(self.vm, file=False, setid=True)

    def feed(self, *changes: Any, tree: Tree | None = None) -> None:
        applier = Applier(tree or self.ours, BOUNDS)
        applier.feed(changes)
        applier.finish()


class CarryTests(TreeCase):
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
        self.assertEqual(list(self.ours.scan(BOUNDS)), [b""])

    def test_kubelets_link_turns_when_all_is_there_and_the_old_goes_last(self) -> None:
        self.write_version("one", b"1")
        base = sync({}, self.ours, self.theirs, writable=False)
        self.write_version("two", b"2")
        todo = plan(base, self.ours.stable(BOUNDS), self.theirs.stable(BOUNDS), writable=False)
        applier = Applier(self.theirs, BOUNDS)
        seen = []
        changes = [*self.ours.read(todo.push), *(Removed(path) for path in todo.push_removed)]
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
        carry(vm, node, list(vm.scan(BOUNDS).values()), [])
        self.assertEqual((ours.read_bytes(), ours.stat().st_ino), (b"a longer message", inode))
        theirs.write_bytes(b"short")
        carry(vm, node, list(vm.scan(BOUNDS).values()), [])
        self.assertEqual(ours.read_bytes(), b"short")

    def test_a_file_that_is_written_meanwhile_is_not_carried(self) -> None:
        (self.node / "file").write_bytes(b"before")
        entry = self.ours.scan(BOUNDS)[b"file"]
        (self.node / "file").write_bytes(b"after!!")
        self.assertRaises(Changed, list, self.ours.read([entry]))

    def test_what_is_gone_or_too_much_says_so(self) -> None:
        (self.node / "one").write_bytes(b"x" * 100)
        self.assertRaises(ResourceExhausted, self.ours.scan, Bounds(0, 1000))
        self.assertRaises(ResourceExhausted, self.ours.scan, Bounds(10, 99))
        gone = Tree(self.top / "gone", file=False, setid=False)
        self.assertRaises(FailedPrecondition, gone.scan, BOUNDS)
        self.assertRaises(ResourceExhausted, Applier(self.theirs, Bounds(10, 99)).feed,
                          self.ours.read(list(self.ours.scan(BOUNDS).values())))  # fmt: skip


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

    @settings(max_examples=60, deadline=None)
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
        settled = plan(base, self.ours.scan(BOUNDS), self.theirs.scan(BOUNDS), writable=True)
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

    @settings(max_examples=300, deadline=None)
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
            self.feed(Removed(inner))
            self.assertRaises(Changed, list, self.ours.read([attrs.evolve(file, size=8)]))
            self.assertNotIn(inner, self.ours.scan(BOUNDS))
            self.unharmed()

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

    def test_a_file_of_the_wrong_length_leaves_nothing(self) -> None:
        entry = Entry(b"file", FILE, 0o600, 0, 0, 4)
        self.assertRaises(InvalidArgument, self.feed, entry, b"abc")
        self.assertRaises(InvalidArgument, self.feed, entry, b"abcde")
        self.assertRaises(InvalidArgument, self.feed, b"data")
        self.assertEqual(os.listdir(self.node), [])
