# SPDX-License-Identifier: Apache-2.0
"""A carried volume: the content of node and VM when they last were equal, and the node's present content."""

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
    """One carried volume.

    :ivar lock: held while the volume is compared or removed.
    :ivar users: the user namespace in which the pod sees the files' ids; None: ids are as on the node.
    :ivar layout: the locations it was made of when a container last began; None: whatever is mounted there.
    :ivar base: the content of both sides when they last were equal; None: not known.
    :ivar last_seen: the node's content at the last comparison.
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
        """Return the record that a restarted daemon needs."""
        base = self.base if self.writable else None
        containers = tuple(sorted(self.containers))
        return VolumeRecord(self.source, self.writable, containers, self.layout, base, self.users)

    def scan(self, bounds: Bounds) -> tuple[Manifest, frozenset[bytes]]:
        """Return the node's content, and the `hidden` paths, at which the content does not count. Blocks.

        :raise Changed: :raise FailedPrecondition: :raise ResourceExhausted: as `stable_scan`."""
        hidden = self._hidden()
        found = {} if b"" in hidden else stable_scan(self.tree, bounds)
        if self._hidden() != hidden:
            raise Changed(f"{self.source.path}: something is being mounted there")
        return found, hidden

    def changed(self, bounds: Bounds) -> bool:
        """Return whether the node's content differs from `last_seen`. Blocks; raises as `scan` does."""
        hidden = self._hidden()
        if self.last_seen is None or hidden != self.hidden:
            return True
        found = {} if b"" in hidden else scan(self.tree, bounds)
        return keys(with_previous(found, self.last_seen, hidden)) != keys(self.last_seen)

    def _hidden(self) -> frozenset[bytes]:
        if self.layout is None:
            return frozenset()
        return changed_paths(self.layout, self._mounts.layout(self.source.path))
