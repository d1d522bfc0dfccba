# SPDX-License-Identifier: Apache-2.0
"""The node's mount table: which file systems a directory's files are on, and whether that has changed.

A container sees what was mounted below its directory when it began, and nothing that is mounted or
unmounted there afterwards: that is propagation PRIVATE, which kubelet asks for unless a pod says
otherwise. A location is a file system and a path in it, so it is still the same for a
later daemon, in a namespace of its own where the same mounts have other ids.
"""

from __future__ import annotations

import os
import re
import select
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock

import attrs

from infranetes_common.filesync.manifest import Manifest

TABLE = "/proc/self/mountinfo"
MAX_CACHED = 10_000  # layouts, until the table changes
_CHANGED = select.POLLPRI | select.POLLERR
_ESCAPED = re.compile(rb"\\([0-7]{3})")


@attrs.frozen
class Location:
    """The real place of a file: its file system and the path in it.

    :ivar device: major:minor of the file system. :ivar path: the path in that file system.
    :ivar writable: whether the mount that leads there is."""

    device: str
    path: bytes
    writable: bool = attrs.field(default=True, eq=False)


Layout = Mapping[bytes, Location]
"""The locations that make up a directory, by path in it; b"": the directory itself."""


@attrs.frozen
class Mount:
    """A line of the mount table. `root` is the part of the file system that is mounted, `source` what the
    file system is on: a device, a server's export, or any word. A `slave` gets the mounts that are made in
    another namespace, and what is mounted below it does not appear there. `options` are the mount's own,
    `super_options` those of the file system, which all its mounts share."""

    id: int
    parent: int
    mount_point: bytes
    device: str
    root: bytes
    fs_type: str
    writable: bool = True
    source: bytes = b""
    slave: bool = False
    options: bytes = b""
    super_options: bytes = b""

    def location(self, path: bytes) -> Location:
        """Return the location of `path`, which is the mount point or below."""
        below = path[len(self.mount_point) :].strip(b"/")
        whole = self.root.rstrip(b"/") + b"/" + below if below else self.root
        return Location(self.device, whole, self.writable)


# The parent of the table's topmost mounts, and the mount of paths on none: a root may not be a mount.
_BOTTOM = Mount(-1, -1, b"/", "", b"/", "")


def parse(table: bytes) -> list[Mount]:
    """Parse a mount table as in proc_pid_mountinfo(5)."""
    found = []
    # Other ends of lines may be in names, such as a pod's subPath.
    for line in filter(None, table.split(b"\n")):
        fields = line.split(b" ")
        end = fields.index(b"-", 6)
        fs_type, source, super_options = fields[end + 1 : end + 4]
        number, parent, device, root, mount_point, options = fields[:6]
        found.append(
            Mount(
                int(number),
                int(parent),
                _unescape(mount_point),
                device.decode(),
                _unescape(root),
                fs_type.decode(errors="replace"),
                writable=b"ro" not in options.split(b","),
                source=_unescape(source),
                slave=any(one.startswith(b"master:") for one in fields[6:end]),
                options=options,
                super_options=_unescape(super_options),
            )
        )
    return found


def _unescape(field: bytes) -> bytes:
    return _ESCAPED.sub(lambda match: bytes([int(match[1], 8)]), field)


def _inside(path: bytes, directory: bytes) -> bool:
    return path == directory or path.startswith(directory.rstrip(b"/") + b"/")


def layout(mounts: Iterable[Mount], top: bytes) -> Layout:
    """The locations of the directory or file `top`, an absolute path without links: its own, and that of
    every mount point below at which another one begins.

    A mount hides an earlier one with the same parent whose mount point is below its own."""
    children = _children(mounts)
    current = _topmost(children, top)
    found = {b"": current.location(top)}
    todo = [(current, top)]
    while todo:
        mount, point = todo.pop()
        here = [one for one in children.get(mount.id, ()) if _inside(one.mount_point, point)]
        for one in here:
            if any(other is not one and _inside(one.mount_point, other.mount_point) for other in here):
                continue
            todo.append((one, one.mount_point))
            location = one.location(one.mount_point)
            if location != mount.location(one.mount_point):  # not a directory mounted onto itself
                found[one.mount_point[len(top) :].strip(b"/")] = location
    return found


def mount_of(mounts: Iterable[Mount], path: bytes) -> Mount:
    """Return the mount that a file is on, by its absolute path without links."""
    return _topmost(_children(mounts), path)


def _children(mounts: Iterable[Mount]) -> Mapping[int, Sequence[Mount]]:
    by_id = {one.id: one for one in mounts}  # each once, so that parents form no circle
    children: dict[int, list[Mount]] = defaultdict(list)
    for one in by_id.values():
        children[one.parent if one.parent in by_id and one.parent != one.id else _BOTTOM.id].append(one)
    return children


def _topmost(children: Mapping[int, Sequence[Mount]], top: bytes) -> Mount:
    current = _BOTTOM
    while steps := [one for one in children.get(current.id, ()) if _inside(top, one.mount_point)]:
        current = min(steps, key=lambda one: len(one.mount_point))
    return current


class MountTable:
    """The node's mounts, read again when they have changed. Its methods block; call them from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._watched = -1
        self._mounts: list[Mount] = []
        self._layouts: dict[str, Layout] = {}  # since the mounts were read

    def fs_type(self, device: int) -> str:
        """The type of a mounted file system by its number; "": there is none. Raises as `layout` does."""
        number = f"{os.major(device)}:{os.minor(device)}"
        with self._lock:
            self._read()
            return next((one.fs_type for one in self._mounts if one.device == number), "")

    def mounts(self) -> Sequence[Mount]:
        """Return the node's mounts. Raises as `layout` does."""
        with self._lock:
            self._read()
            return self._mounts

    def layout(self, path: str) -> Layout:
        """Return the present layout of a directory. :raise OSError: the table can't be read."""
        with self._lock:
            self._read()
            if path not in self._layouts:
                if len(self._layouts) >= MAX_CACHED:
                    self._layouts.clear()
                self._layouts[path] = layout(self._mounts, os.fsencode(path))
            return self._layouts[path]

    def close(self) -> None:
        """Close the file that reports changes. It is opened again when needed. Idempotent."""
        with self._lock:
            if self._watched >= 0:
                os.close(self._watched)
                self._watched = -1

    def _read(self) -> None:
        fresh = self._watched < 0
        if fresh:
            self._watched = os.open(TABLE, os.O_RDONLY | os.O_CLOEXEC)
        changes = select.poll()
        changes.register(self._watched, _CHANGED)
        if changes.poll(0) or fresh:
            self._mounts = parse(Path(TABLE).read_bytes())
            self._layouts.clear()


def changed_paths(before: Layout, now: Layout) -> frozenset[bytes]:
    """Return the paths in a directory at which something was mounted or unmounted."""
    return frozenset(path for path in {*before, *now} if before.get(path) != now.get(path))


def outermost_writable(layout: Layout) -> list[bytes]:
    """Return the writable mount points below a directory, without those that are inside one another."""
    found: list[bytes] = []
    for path in sorted(layout):
        if path and layout[path].writable and not any(_inside(path, one) for one in found):
            found.append(path)
    return found


def with_previous(manifest: Manifest, before: Manifest, changed: frozenset[bytes]) -> Manifest:
    """Return `manifest`, with what is at and below `changed` paths replaced by what was there `before`."""
    if not changed:
        return manifest

    def replaced(path: bytes) -> bool:
        while path not in changed:
            if not path:
                return False
            path = path.rpartition(b"/")[0]
        return True

    same = {path: entry for path, entry in manifest.items() if not replaced(path)}
    return {**same, **{path: entry for path, entry in before.items() if replaced(path)}}
