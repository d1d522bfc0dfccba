# SPDX-License-Identifier: Apache-2.0
"""What a plan puts off."""

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
from infranetes_common.filesync.plan import Plan, plan, put_off


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
