"""One volume: what both its sides had last, and what the node has now."""

from __future__ import annotations

from twisted.internet.defer import DeferredLock

from infranetes.volumes.mounts import Source
from infranetes.volumes.places import MountTable, Places, as_before, moved
from infranetes.volumes.records import Record
from infranetes_common.entries import Bounds, Changed, Manifest
from infranetes_common.tree import Tree
from infranetes_common.volumes import keys


class Volume:
    """One volume.

    :ivar places: which file systems it was made of when a container last began, None: whatever is there.
    :ivar base: what both sides had when they last were the same, None: not known.
    :ivar seen: the node's side when it was last compared. :ivar later: where it counted for nothing then,
        something having been mounted or unmounted there since. :ivar due: it has to be compared.
    """

    def __init__(self, source: Source, mounts: MountTable) -> None:
        self._mounts = mounts
        self.source = source
        self.writable = False
        self.containers: set[str] = set()
        self.places: Places | None = None
        self.base: Manifest | None = None
        self.seen: Manifest | None = None
        self.later: frozenset[bytes] = frozenset()
        self.due = True
        self.trouble = ""
        self.lock = DeferredLock()
        self.tree = Tree(source.path, file=source.file, setid=False)

    @property
    def record(self) -> Record:
        base = self.base if self.writable else None
        return Record(self.source, self.writable, tuple(sorted(self.containers)), self.places, base)

    def look(self, bounds: Bounds) -> tuple[Manifest, frozenset[bytes]]:
        """What the node has, and where that counts for nothing. Blocks.

        :raise Changed: :raise FailedPrecondition: :raise ResourceExhausted: as `Tree.stable`."""
        later = self._later()
        found = {} if b"" in later else self.tree.stable(bounds)
        if self._later() != later:
            raise Changed(f"{self.source.path}: something is being mounted there")
        return found, later

    def changed(self, bounds: Bounds) -> bool:
        """Whether the node has something else than was `seen`. Blocks; raises as `Tree.scan`."""
        later = self._later()
        if self.seen is None or later != self.later:
            return True
        found = {} if b"" in later else self.tree.scan(bounds)
        return keys(as_before(found, self.seen, later)) != keys(self.seen)

    def _later(self) -> frozenset[bytes]:
        """Where something was mounted or unmounted after a container began."""
        if self.places is None:
            return frozenset()
        return moved(self.places, self._mounts.places(self.source.path))
