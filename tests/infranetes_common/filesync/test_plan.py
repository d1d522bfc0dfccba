# SPDX-License-Identifier: Apache-2.0
"""What a plan sends each way, what both sides have afterwards, and what it puts off."""

from __future__ import annotations

import os
from collections.abc import Collection

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.filesync.manifest import (
    DIRECTORY,
    FILE,
    SYMLINK,
    Entry,
    Manifest,
)
from infranetes_common.filesync.plan import Plan, agreed, keys, plan, put_off


def file(path: bytes, mtime: int = 1) -> Entry:
    return Entry(path, FILE, 0o644, 0, 0, 1, mtime)


def directory(path: bytes, mode: int = 0o755) -> Entry:
    return Entry(path, DIRECTORY, mode, 0, 0)


def link(path: bytes, target: bytes) -> Entry:
    return Entry(path, SYMLINK, 0o777, 0, 0, target=target)


def of(*entries: Entry) -> Manifest:
    return {entry.path: entry for entry in entries}


NOTHING = Plan([], [], [], [])


class PlanTests(SynchronousTestCase):
    def test_what_goes_each_way(self) -> None:
        entry = [file(b"a")]
        for made, expected in (
            (NOTHING, (False, False)),
            (Plan(entry, [], [], []), (True, False)),
            (Plan([], [b"a"], [], []), (True, False)),
            (Plan([], [], entry, []), (False, True)),
            (Plan([], [], [], [b"a"]), (False, True)),
        ):
            self.assertEqual((made.pushes, made.pulls), expected, made)


class DirectionTests(SynchronousTestCase):
    """Which side of an entry wins."""

    def test_the_side_that_has_changed(self) -> None:
        old, new, none = of(file(b"a")), of(file(b"a", 2)), of()
        for base, node, vm, expected in (
            (old, old, old, NOTHING),
            (old, new, old, Plan([file(b"a", 2)], [], [], [])),
            (old, old, new, Plan([], [], [file(b"a", 2)], [])),
            (none, new, none, Plan([file(b"a", 2)], [], [], [])),
            (none, none, new, Plan([], [], [file(b"a", 2)], [])),
            (old, none, old, Plan([], [b"a"], [], [])),
            (old, old, none, Plan([], [], [], [b"a"])),
            (old, none, none, NOTHING),
            (none, new, new, NOTHING),
            (old, new, new, NOTHING),
        ):
            self.assertEqual(plan(base, node, vm, writable=True), expected)

    def test_of_two_that_changed_the_later_one_and_of_equals_the_nodes(self) -> None:
        base, early, late = of(file(b"a")), file(b"a", 2), file(b"a", 3)
        self.assertEqual(plan(base, of(late), of(early), writable=True).push, [late])
        self.assertEqual(plan(base, of(early), of(late), writable=True).pull, [late])
        other = Entry(b"a", FILE, 0o600, 0, 0, 1, 2)
        self.assertEqual(plan(base, of(early), of(other), writable=True), Plan([early], [], [], []))

    def test_what_exists_wins_over_its_removal(self) -> None:
        base, new = of(file(b"a")), file(b"a", 2)
        self.assertEqual(plan(base, of(), of(new), writable=True), Plan([], [], [new], []))
        self.assertEqual(plan(base, of(new), of(), writable=True), Plan([new], [], [], []))

    def test_always_the_nodes_where_the_vm_may_not_write(self) -> None:
        old, new = of(file(b"a")), of(file(b"a", 2))
        self.assertEqual(plan(old, old, new, writable=False), Plan([file(b"a")], [], [], []))
        self.assertEqual(plan(of(), of(), new, writable=False), Plan([], [b"a"], [], []))
        self.assertEqual(plan(old, old, of(), writable=False), Plan([file(b"a")], [], [], []))

    def test_a_file_in_the_place_of_a_directory_takes_all_below_it_away(self) -> None:
        tree = of(directory(b"a"), directory(b"a/x"), file(b"a/x/y"))
        for mtime in (1, 0):  # a directory has none
            it = of(file(b"a", mtime))
            found = plan({}, tree, it, writable=True)
            removed = [b"a/x/y", b"a/x"]
            expected = Plan([], [], [it[b"a"]], removed) if mtime else Plan([*tree.values()], [], [], [])
            self.assertEqual(found, expected)
            found = plan({}, it, tree, writable=True)
            self.assertEqual(found, Plan([it[b"a"]], removed, [], []))

    def test_so_does_a_file_in_the_place_of_the_whole_tree(self) -> None:
        tree, it = of(directory(b""), file(b"x")), of(file(b"", 1))
        self.assertEqual(plan({}, tree, it, writable=True), Plan([], [], [it[b""]], [b"x"]))

    def test_what_stays_keeps_the_directories_that_it_is_in(self) -> None:
        tree = of(directory(b"a"), directory(b"a/x"), file(b"a/x/y"))
        later = {**tree, b"a/x/y": file(b"a/x/y", 2)}
        self.assertEqual(plan(tree, of(), later, writable=True), Plan([], [], [*later.values()], []))
        self.assertEqual(plan(tree, later, of(), writable=True), Plan([*later.values()], [], [], []))

    def test_a_directory_on_both_sides_is_judged_by_itself(self) -> None:
        base = of(directory(b"a"))
        node = of(directory(b"a", 0o700))
        vm = of(directory(b"a"), file(b"a/x"))
        self.assertEqual(plan(base, node, vm, writable=True), Plan([*node.values()], [], [file(b"a/x")], []))

    def test_links_come_last_and_what_is_inside_goes_first(self) -> None:
        node = of(link(b"..data", b"b"), directory(b"b"), file(b"b/key"))
        vm = of(directory(b"c"), directory(b"c/d"), file(b"c/d/e"))
        found = plan(vm, node, vm, writable=True)
        self.assertEqual([entry.path for entry in found.push], [b"b", b"b/key", b"..data"])
        self.assertEqual(found.push_removed, [b"c/d/e", b"c/d", b"c"])
        self.assertEqual((found.pushes, found.pulls), (True, False))
        self.assertEqual((NOTHING.pushes, NOTHING.pulls), (False, False))
        for one in (Plan([], [], [file(b"a")], []), Plan([], [], [], [b"a"])):
            self.assertEqual((one.pushes, one.pulls), (False, True))


class AgreedTests(SynchronousTestCase):
    def test_what_both_have_when_all_is_done(self) -> None:
        done = Plan([file(b"a", 2)], [b"gone"], [file(b"b", 3), file(b"new")], [b"c", b"never"])
        node = of(file(b"a", 2), file(b"b"), file(b"c"), file(b"d"))
        expected = of(file(b"a", 2), file(b"b", 3), file(b"d"), file(b"new"))
        self.assertEqual(agreed(node, done), expected)
        self.assertEqual(agreed(expected, NOTHING), expected)

    def test_what_could_not_be_written_on_the_node_is_in_the_next_plan_again(self) -> None:
        base = of(file(b"a"), file(b"c"))
        vm = of(file(b"a", 2), file(b"b"))
        done = plan(base, base, vm, writable=True)
        both = agreed(base, done, base, failed=[b"a", b"b", b"c"])
        self.assertEqual(both, base)
        self.assertEqual(plan(both, base, vm, writable=True), done)
        self.assertEqual(agreed(base, done, None, failed=[b"a", b"b", b"c"]), of())

    def test_manifests_are_compared_by_keys(self) -> None:
        self.assertIsNone(keys(None))
        self.assertEqual(keys(of(file(b"a"))), {b"a": file(b"a").key})


class PutOffTests(SynchronousTestCase):
    """What a link led to is there for one more look."""

    def look(self, base: Manifest, node: Manifest, before: Collection[bytes]) -> tuple[Plan, Manifest]:
        return put_off(plan(base, node, base, writable=False), base, before)

    def version(self, name: bytes) -> Manifest:
        link = Entry(b"..data", SYMLINK, 0o777, 0, 0, target=name)
        file = Entry(name + b"/key", FILE, 0o644, 0, 0, 1, 1)
        return {entry.path: entry for entry in (link, Entry(name, DIRECTORY, 0o755, 0, 0), file)}

    def test_the_old_version_goes_one_look_later_also_where_each_finds_another(self) -> None:
        vm: Manifest = self.version(b"1")
        left: Manifest = {}
        for name in (b"2", b"3", b"4"):
            before, node = set(left), self.version(name)
            old = os.path.basename(vm[b"..data"].target)
            todo, left = self.look(vm, node, before)
            self.assertEqual(set(left), {old, old + b"/key"})
            self.assertEqual(set(todo.push_removed), before)
            vm = {**node, **left}
        todo, left = self.look(vm, node, set(left))
        self.assertEqual((todo.push_removed, left), ([b"3/key", b"3"], {}))

    def test_without_a_link_that_is_turned_it_goes_at_once(self) -> None:
        both = self.version(b"1")
        node = {path: entry for path, entry in both.items() if path == b"..data"}
        todo, left = self.look(both, node, ())
        self.assertEqual((todo.push_removed, left), ([b"1/key", b"1"], {}))

    def test_a_link_that_was_not_there_puts_nothing_off(self) -> None:
        old = of(directory(b"1"), file(b"1/key"))
        done = plan(old, of(link(b"..data", b"2")), old, writable=False)
        self.assertEqual(put_off(done, old, ()), (done, {}))

    def test_the_directory_of_what_is_put_off_stays_with_it(self) -> None:
        theirs = of(link(b"..data", b"2"), directory(b"1"), file(b"1/late"), file(b"other"))
        done = plan(theirs, of(link(b"..data", b"3")), theirs, writable=False)
        todo, left = put_off(done, theirs, (b"1", b"other"))
        self.assertEqual((todo.push_removed, todo.push), ([b"other"], done.push))
        self.assertEqual(left, of(directory(b"1"), file(b"1/late")))
