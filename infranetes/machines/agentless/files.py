# SPDX-License-Identifier: Apache-2.0
"""The volumes of a guest without our agent: trees that this node keeps in memory and brings into the guest.

What the guest writes there stays in the guest. So only small trees are kept, such as Secrets and ConfigMaps;
a tree that is larger has to be a disk.
"""

from __future__ import annotations

import posixpath
from collections.abc import AsyncIterator, Mapping

from infranetes.machines.agentless.access import GuestFile
from infranetes_common.errors import NotFound, ResourceExhausted
from infranetes_common.filesync.manifest import (
    DIRECTORY,
    FILE,
    SYMLINK,
    Bounds,
    Change,
    Entry,
    Manifest,
    Removed,
    Unread,
)

MOST_BYTES = 8 << 20  # of all volumes of a guest; a Secret or ConfigMap has at most 1 MiB
_LINKS = 40  # that are followed one after the other, as Linux does


class GuestVolume:
    """One volume, as it was put last.

    :param file: whether it is one file, not a directory.
    :ivar entries: what is in it, by path. :ivar contents: those of its files.
    """

    def __init__(self, *, file: bool) -> None:
        self.file = file
        self.entries: dict[bytes, Entry] = {}
        self.contents: dict[bytes, bytes] = {}

    @property
    def size(self) -> int:
        """The bytes of its files."""
        return sum(map(len, self.contents.values()))

    def files(self, below: str = "") -> dict[str, GuestFile]:
        """Return the files that a reader finds below a path in it, with links followed, by path from there.

        The hidden directories in which kubelet keeps the versions of a volume are left out: links show them.

        :param below: "": all of it. A path that is a file is returned as ""."""
        by_path: dict[str, GuestFile] = {}
        top = self._resolved(below.strip("/").encode())
        if top is None:
            return by_path
        if self.entries[top].kind == FILE:
            return {"": self._file(top)}
        self._walk(top, "", by_path, frozenset())
        return by_path

    def _walk(self, top: bytes, shown: str, by_path: dict[str, GuestFile], above: frozenset[bytes]) -> None:
        if top in above:
            return  # a link to a directory that it is in
        for path in sorted(self.entries):
            parent, name = posixpath.split(path)
            if parent != top or path == top or name.startswith(b".."):
                continue
            target = self._resolved(path)
            if target is None:
                continue
            label = posixpath.join(shown, name.decode("utf-8", "surrogateescape"))
            if self.entries[target].kind == FILE:
                by_path[label] = self._file(target)
            else:
                self._walk(target, label, by_path, above | {top})

    def _file(self, path: bytes) -> GuestFile:
        return GuestFile(self.contents.get(path, b""), self.entries[path].mode & 0o777)

    def _resolved(self, path: bytes, left: int = _LINKS) -> bytes | None:
        """Return the path of what is at `path`, with links followed; None: nothing in the volume is."""
        at = b""
        for name in path.split(b"/") if path else ():
            at = posixpath.join(at, name)
            entry = self.entries.get(at)
            if entry is None:
                return None
            if entry.kind == SYMLINK:
                if not left or entry.target.startswith(b"/"):
                    return None
                target = posixpath.normpath(posixpath.join(posixpath.dirname(at), entry.target))
                if target == b".." or target.startswith(b"../"):
                    return None
                resolved = self._resolved(b"" if target == b"." else target, left - 1)
                if resolved is None:
                    return None
                at = resolved
        return at if at in self.entries else None


class GuestVolumes:
    """The volumes of one guest, by id."""

    def __init__(self) -> None:
        self._volumes: dict[str, GuestVolume] = {}

    def __contains__(self, id: str) -> bool:
        return id in self._volumes

    def get(self, id: str) -> GuestVolume:
        """Return a volume. :raise NotFound: there is no such volume."""
        try:
            return self._volumes[id]
        except KeyError:
            raise NotFound(f"the guest has no volume {id}") from None

    def manifest(self, id: str) -> Manifest:
        """Return what is in a volume. :raise NotFound: there is no such volume."""
        return dict(self.get(id).entries)

    def remove(self, id: str) -> None:
        """Forget a volume. Idempotent."""
        self._volumes.pop(id, None)

    async def put(self, id: str, changes: AsyncIterator[Change], bounds: Bounds, *, file: bool) -> None:
        """Apply changes, all or none.

        :raise ResourceExhausted: the volume is too large for a guest without our agent."""
        before = self._volumes.get(id)
        changed = GuestVolume(file=file)
        if before is not None:
            changed.entries, changed.contents = dict(before.entries), dict(before.contents)
        room = MOST_BYTES - sum(one.size for each, one in self._volumes.items() if each != id)
        pieces: list[bytes] = []
        last: Entry | None = None
        async for change in changes:
            if isinstance(change, bytes):
                pieces.append(change)
                room -= len(change)
                if room < 0:
                    raise _too_large(id)
                continue
            _end_file(changed, last, pieces)
            pieces, last = [], None
            if isinstance(change, Entry):
                changed.entries[change.path] = change
                changed.contents.pop(change.path, None)
                last = change if change.kind == FILE else None
            elif isinstance(change, Removed):
                _remove(changed, change.path)
            elif isinstance(change, Unread) and before is not None and change.path in before.contents:
                changed.contents[change.path] = before.contents[change.path]
        _end_file(changed, last, pieces)
        if changed.size > MOST_BYTES or len(changed.entries) > bounds.entries + 1:
            raise _too_large(id)
        if not file:
            changed.entries.setdefault(b"", Entry(b"", DIRECTORY, 0o755, 0, 0))
        self._volumes[id] = changed


def _end_file(volume: GuestVolume, entry: Entry | None, pieces: list[bytes]) -> None:
    if entry is not None and entry.path not in volume.contents:
        volume.contents[entry.path] = b"".join(pieces)


def _remove(volume: GuestVolume, path: bytes) -> None:
    for name in [name for name in volume.entries if name == path or name.startswith(path + b"/")]:
        del volume.entries[name]
        volume.contents.pop(name, None)


def _too_large(id: str) -> ResourceExhausted:
    return ResourceExhausted(
        f"volume {id} is too large for a guest without our agent, which gets {MOST_BYTES >> 20} MiB of "
        "files; make it a disk (a PersistentVolumeClaim), or put our agent into the image"
    )


def mounted_files(volumes: GuestVolumes, mounts: Mapping[str, str]) -> dict[str, GuestFile]:
    """Return the files that mounts show, by their whole path in the guest.

    :param mounts: by path in the guest, a volume's id and what follows it after a "/"."""
    files: dict[str, GuestFile] = {}
    for path, source in mounts.items():
        id, _, below = source.partition("/")
        if id in volumes:
            for name, file in volumes.get(id).files(below).items():
                files[posixpath.join(path, name) if name else path] = file
    return files
