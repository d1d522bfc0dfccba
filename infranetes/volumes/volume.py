# SPDX-License-Identifier: Apache-2.0
"""One volume: what node and VM had when they last were the same, and what the node has now."""

from __future__ import annotations

from twisted.internet.defer import DeferredLock

from infranetes.volumes.mount_table import Layout, MountTable, changed_paths, with_previous
from infranetes.volumes.mounts import Source
from infranetes.volumes.records import VolumeRecord
from infranetes_common.concurrency import still_alive
from infranetes_common.filesync.manifest import Bounds, Changed, Manifest
from infranetes_common.filesync.plan import keys
from infranetes_common.filesync.scan import scan, stable_scan
from infranetes_common.filesync.tree import Tree
from infranetes_common.user_namespaces import UserNamespace


class Volume:
    """One volume.

    :ivar lock: held by whoever compares or removes it.
    :ivar users: with whose ids the pod sees its files; None: they are as on the node.
    :ivar layout: the locations it was made of when a container last began; None: whatever is mounted there.
    :ivar base: what both sides had when they last were the same; None: not known.
    :ivar last_seen: what the node had at the last comparison.
    :ivar hidden: the paths that did not count in it,
        because something was mounted or unmounted there after a container began.
    :ivar due: whether it has to be compared again.
    :ivar unsure: whether the VM may have rebooted since it was compared: what it had in memory is gone then.
    :ivar put_off: paths that are to be removed from the VM the next time.
    :ivar being_checked: whether it is being looked at for changes on the node.
    :ivar received: how many pieces have ever come from the VM.
    :ivar reported_at: when the VM last reported a change, by the reactor's clock.
    :ivar trouble: why the last comparison failed; "": it did not.
    """

    def __init__(self, source: Source, mounts: MountTable) -> None:
        self._mounts = mounts
        self.source = source
        self.writable = False
        self.containers: set[str] = set()
        self.users: UserNamespace | None = None
        self.layout: Layout | None = None
        self.base: Manifest | None = None
        self.last_seen: Manifest | None = None
        self.hidden: frozenset[bytes] = frozenset()
        self.due = True
        self.unsure = False
        self.reported_at = 0.0
        self.trouble = ""
        self.put_off: frozenset[bytes] = frozenset()
        self.being_checked = False
        self.received = 0
        self.lock = DeferredLock()
        self.tree = Tree(source.path, file=source.file, setid=False, alive=still_alive)

    @property
    def record(self) -> VolumeRecord:
        """What the next daemon has to know of it."""
        base = self.base if self.writable else None
        containers = tuple(sorted(self.containers))
        return VolumeRecord(self.source, self.writable, containers, self.layout, base, self.users)

    def scan(self, bounds: Bounds) -> tuple[Manifest, frozenset[bytes]]:
        """What the node has, and the `hidden` paths, at which that does not count. Blocks.

        :raise Changed: :raise FailedPrecondition: :raise ResourceExhausted: as `stable_scan`."""
        hidden = self._hidden()
        found = {} if b"" in hidden else stable_scan(self.tree, bounds)
        if self._hidden() != hidden:
            raise Changed(f"{self.source.path}: something is being mounted there")
        return found, hidden

    def changed(self, bounds: Bounds) -> bool:
        """Whether the node has anything else than what was `last_seen`. Blocks; raises as `scan`."""
        hidden = self._hidden()
        if self.last_seen is None or hidden != self.hidden:
            return True
        found = {} if b"" in hidden else scan(self.tree, bounds)
        return keys(with_previous(found, self.last_seen, hidden)) != keys(self.last_seen)

    def _hidden(self) -> frozenset[bytes]:
        if self.layout is None:
            return frozenset()
        return changed_paths(self.layout, self._mounts.layout(self.source.path))
