# SPDX-License-Identifier: Apache-2.0
"""The plan of what to send each way so that the two sides of a tree become equal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import attrs

from infranetes_common.filesync.manifest import SYMLINK, Entry, Key, Manifest, ordered


@attrs.frozen
class Plan:
    """The changes to send to the VM (push) and to fetch from it (pull), in the order to apply them."""

    push: list[Entry]
    push_removed: list[bytes]
    pull: list[Entry]
    pull_removed: list[bytes]

    @property
    def pushes(self) -> bool:
        """True if anything goes to the VM."""
        return bool(self.push or self.push_removed)

    @property
    def pulls(self) -> bool:
        """True if anything comes from the VM."""
        return bool(self.pull or self.pull_removed)


def plan(base: Mapping[bytes, Entry], node: Manifest, vm: Manifest, *, writable: bool) -> Plan:
    """Return the changes that make both sides equal.

    A side that differs from `base` has changed. Where both have changed, an existing entry wins over a
    removal, and the later of two files wins.

    :param base: the entries of both sides when they were last equal.
    :param writable: whether anything may come from the VM at all.
    """
    to_vm = _directions(base, node, vm, writable)
    return Plan(
        push=ordered(node[path] for path, pushed in to_vm.items() if pushed and path in node),
        push_removed=_deepest_first(path for path, pushed in to_vm.items() if pushed and path not in node),
        pull=ordered(vm[path] for path, pushed in to_vm.items() if not pushed and path in vm),
        pull_removed=_deepest_first(path for path, pushed in to_vm.items() if not pushed and path not in vm),
    )


def agreed(
    node: Manifest, done: Plan, base: Mapping[bytes, Entry] | None = None, failed: Iterable[bytes] = ()
) -> Manifest:
    """Return the manifest that both sides have once `done` is applied.

    :param failed: paths from the VM that could not be written on the node. They stay as in `base`, so that
        the next plan has them again.
    """
    both = {**node, **{entry.path: entry for entry in done.pull}}
    for path in done.pull_removed:
        both.pop(path, None)
    for path in failed:
        before = (base or {}).get(path)
        if before is None:
            both.pop(path, None)
        else:
            both[path] = before
    return both


def put_off(done: Plan, theirs: Manifest, before: Collection[bytes]) -> tuple[Plan, Manifest]:
    """Put off removals in the VM while a link there is switched.

    A program that followed the link a moment ago still finds the old tree, until the next sync.

    :param before: paths that were put off the last time, which are removed now.
    :return: `done` without the postponed removals, and the entries that the VM keeps for now.
    """
    turned = any(entry.kind == SYMLINK and entry.path in theirs for entry in done.push)
    late = [path for path in done.push_removed if path not in before] if turned else []
    rest = [path for path in done.push_removed if path not in late]
    left = {path: theirs[path] for path in late}
    parents = {above: theirs[above] for path in late for above in _above(path) if above in rest}
    rest = [path for path in rest if path not in parents]
    return attrs.evolve(done, push_removed=rest), {**left, **parents}


def _above(path: bytes) -> Iterator[bytes]:
    while path := path.rpartition(b"/")[0]:
        yield path


def keys(manifest: Manifest | None) -> dict[bytes, Key] | None:
    """Return each entry's `Entry.key`, by which manifests are compared; None if it is not known."""
    return None if manifest is None else {path: entry.key for path, entry in manifest.items()}


def _directions(
    base: Mapping[bytes, Entry], node: Manifest, vm: Manifest, writable: bool
) -> dict[bytes, bool]:
    """Return the paths that differ, and whether the node's side of each wins."""
    to_vm: dict[bytes, bool] = {}
    clashes: dict[bytes, bool] = {}  # paths of a directory on one side and of another kind on the other
    for path in sorted({**node, **vm}):
        ours, theirs = node.get(path), vm.get(path)
        above = path.rpartition(b"/")[0]
        if above in clashes:  # not yet those of the top itself, which comes first
            to_vm[path] = clashes[path] = clashes[above]
            continue
        if _same(ours, theirs):
            continue
        before = base.get(path)
        if not writable or _same(theirs, before):
            to_vm[path] = True
        elif _same(ours, before):
            to_vm[path] = False
        elif ours is None or theirs is None:
            to_vm[path] = ours is not None
        else:
            to_vm[path] = ours.mtime >= theirs.mtime
        if ours is not None and theirs is not None and ours.kind != theirs.kind:
            clashes[path] = to_vm[path]
    for path, pushed in list(to_vm.items()):
        if path in (node if pushed else vm):  # it stays, so its parent directories must stay
            while path := path.rpartition(b"/")[0]:
                if to_vm.get(path, pushed) is not pushed and path not in (vm if pushed else node):
                    to_vm[path] = pushed
    return to_vm


def _same(one: Entry | None, other: Entry | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.key == other.key


def _deepest_first(paths: Iterable[bytes]) -> list[bytes]:
    return sorted(paths, reverse=True)
