# SPDX-License-Identifier: Apache-2.0
"""Two trees, one on each side, and a sync between them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.filesync.apply import Applier
from infranetes_common.filesync.manifest import (
    Bounds,
    Entry,
    Manifest,
    Removed,
)
from infranetes_common.filesync.plan import plan
from infranetes_common.filesync.scan import read, scan, stable_scan
from infranetes_common.filesync.tree import Tree
from infranetes_common.filesync.wire import change_from_wire, change_to_wire

BOUNDS = Bounds(1000, 1_000_000)


def carry(source: Tree, target: Tree, entries: list[Entry], removed: list[bytes]) -> None:
    """One side's changes to the other, as they go over the wire."""
    applier = Applier(target, BOUNDS)
    for change in read(source, entries):
        applier.feed([change_from_wire(change_to_wire(change))])
    applier.feed([Removed(path) for path in removed])
    applier.finish()


def sync(base: Manifest, node: Tree, vm: Tree, *, writable: bool = True) -> Manifest:
    """What both have afterwards."""
    todo = plan(base, stable_scan(node, BOUNDS), stable_scan(vm, BOUNDS), writable=writable)
    carry(vm, node, todo.pull, todo.pull_removed)
    carry(node, vm, todo.push, todo.push_removed)
    return scan(node, BOUNDS)


def keys(tree: Tree) -> dict[bytes, Any]:
    return {path: entry.key for path, entry in scan(tree, BOUNDS).items()}


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
        applier.check_whole()
