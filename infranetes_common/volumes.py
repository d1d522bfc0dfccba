"""What is said of a volume between node and agent, and what two sides of one have to carry to agree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from infranetes_common import vmserver
from infranetes_common.entries import (
    DIRECTORY,
    FILE,
    SYMLINK,
    Change,
    Entry,
    Manifest,
    Removed,
    check_entry,
    ordered,
)
from infranetes_common.errors import InvalidArgument

PREFIX = "infranetes-volume:"  # before a volume's id, in the host_path of a mount that is sent to an agent
PAGE = 256  # entries of a manifest in one message
BATCH_BYTES = 512 * 1024
_BATCH_CHANGES = 256

_KINDS: dict[str, Any] = {FILE: 0, DIRECTORY: 1, SYMLINK: 2}
_NAMES = {number: name for name, number in _KINDS.items()}


def to_wire(entry: Entry) -> Any:
    """A VolumeEntry."""
    return vmserver.VolumeEntry(
        path=entry.path,
        kind=_KINDS[entry.kind],
        mode=entry.mode,
        uid=entry.uid,
        gid=entry.gid,
        size=entry.size,
        mtime_nanos=entry.mtime,
        target=entry.target,
    )


def from_wire(sent: Any) -> Entry:
    """An Entry that has been checked. :raise InvalidArgument: it is none."""
    if sent.kind not in _NAMES:
        raise InvalidArgument(f"{sent.path[:200]!r} in a volume: neither file nor directory nor link")
    return check_entry(
        Entry(
            sent.path, _NAMES[sent.kind], sent.mode, sent.uid, sent.gid, sent.size, sent.mtime_nanos,
            sent.target,
        )
    )  # fmt: skip


def change_to_wire(change: Change) -> Any:
    """A VolumeChange."""
    if isinstance(change, Entry):
        return vmserver.VolumeChange(entry=to_wire(change))
    if isinstance(change, Removed):
        return vmserver.VolumeChange(removed=change.path)
    return vmserver.VolumeChange(data=change)


def change_from_wire(sent: Any) -> Change:
    """:raise InvalidArgument: it is none."""
    kind = sent.WhichOneof("change")
    if kind == "entry":
        return from_wire(sent.entry)
    if kind == "removed":
        return Removed(bytes(sent.removed))
    if kind == "data":
        return bytes(sent.data)
    raise InvalidArgument("a change of a volume that is none")


def batch(changes: Iterator[Change]) -> list[Change]:
    """The next of them, some; empty: there are no more."""
    taken: list[Change] = []
    size = 0
    for change in changes:
        taken.append(change)
        size += len(change) if isinstance(change, bytes) else 0
        if size >= BATCH_BYTES or len(taken) >= _BATCH_CHANGES:
            break
    return taken


@attrs.frozen
class Plan:
    """What goes to the VM and what comes from it, in the order in which it is applied."""

    push: list[Entry]
    push_removed: list[bytes]
    pull: list[Entry]
    pull_removed: list[bytes]

    @property
    def pushes(self) -> bool:
        return bool(self.push or self.push_removed)

    @property
    def pulls(self) -> bool:
        return bool(self.pull or self.pull_removed)


def plan(base: Mapping[bytes, Entry], node: Manifest, vm: Manifest, *, writable: bool) -> Plan:
    """What makes the two sides the same.

    :param base: what both had when they last were. A side that differs from it has changed. Where both
        have, what exists wins over what was removed, and the later of two files.
    :param writable: whether anything may come from the VM at all."""
    to_vm = _directions(base, node, vm, writable)
    return Plan(
        push=ordered(node[path] for path, pushed in to_vm.items() if pushed and path in node),
        push_removed=_deepest_first(path for path, pushed in to_vm.items() if pushed and path not in node),
        pull=ordered(vm[path] for path, pushed in to_vm.items() if not pushed and path in vm),
        pull_removed=_deepest_first(path for path, pushed in to_vm.items() if not pushed and path not in vm),
    )


def agreed(node: Manifest, done: Plan) -> Manifest:
    """What both sides have once that is done."""
    both = {**node, **{entry.path: entry for entry in done.pull}}
    for path in done.pull_removed:
        both.pop(path, None)
    return both


def keys(manifest: Manifest | None) -> dict[bytes, Any] | None:
    """What is equal for two that need no carrying, None: not known."""
    return None if manifest is None else {path: entry.key for path, entry in manifest.items()}


def _directions(
    base: Mapping[bytes, Entry], node: Manifest, vm: Manifest, writable: bool
) -> dict[bytes, bool]:
    """Which paths differ, and whether the node's side of each is what it becomes."""
    to_vm: dict[bytes, bool] = {}
    clashes: dict[bytes, bool] = {}  # a directory on one side and something else on the other
    for path in sorted({**node, **vm}):
        ours, theirs = node.get(path), vm.get(path)
        above = path.rpartition(b"/")[0]
        if above in clashes and path:
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
        if path in (node if pushed else vm):  # it stays, so what it is in has to
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
