"""Where the files of a directory of the node really are, so that mounts made later can be told.

A container sees what was mounted below its directory when it began, and nothing that is mounted or
unmounted there afterwards: that is propagation PRIVATE, what kubelet asks for unless a pod says
otherwise. A place is a file system and a path in it, so it outlives a daemon that finds the same
mounts in a namespace of its own, under other mount ids.
"""

from __future__ import annotations

import os
import re
import select
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Lock

import attrs

from infranetes_common.entries import Manifest

TABLE = "/proc/self/mountinfo"
ANSWERS = 10_000  # kept at most, until the table changes
_CHANGED = select.POLLPRI | select.POLLERR
_ESCAPED = re.compile(rb"\\([0-7]{3})")


@attrs.frozen
class Place:
    """`device`: major:minor of the file system. `path`: in it. `writable`: by this mount of it."""

    device: str
    path: bytes
    writable: bool = attrs.field(default=True, eq=False)


Places = Mapping[bytes, Place]  # by path in the directory, b"": the directory itself


@attrs.frozen
class Mount:
    """A line of the table. `at`: the mount point. `root`: what of the file system is there. `kind`: its
    type."""

    id: int
    parent: int
    at: bytes
    device: str
    root: bytes
    kind: str
    writable: bool = True

    def place(self, path: bytes) -> Place:
        """Of `path`, which is at the mount point or below."""
        below = path[len(self.at) :].strip(b"/")
        whole = self.root.rstrip(b"/") + b"/" + below if below else self.root
        return Place(self.device, whole, self.writable)


# Above all of the table: what a process whose root is no mount point stands on.
_BOTTOM = Mount(-1, -1, b"/", "", b"/", "")


def parse(table: bytes) -> list[Mount]:
    """Lines as in proc_pid_mountinfo(5)."""
    found = []
    for line in table.splitlines():
        fields = line.split(b" ")
        number, parent, device, root, at, options = fields[:6]
        kind = fields[fields.index(b"-") + 1].decode(errors="replace")
        writable = b"ro" not in options.split(b",")
        found.append(
            Mount(int(number), int(parent), _unescape(at), device.decode(), _unescape(root), kind, writable)
        )
    return found


def _unescape(field: bytes) -> bytes:
    return _ESCAPED.sub(lambda match: bytes([int(match[1], 8)]), field)


def _inside(path: bytes, directory: bytes) -> bool:
    return path == directory or path.startswith(directory.rstrip(b"/") + b"/")


def places(mounts: Iterable[Mount], top: bytes) -> Places:
    """Those of the directory or file `top`, an absolute path without links: its own, and that of every mount
    point below where something else begins.

    Of mounts with one parent, one whose point is below another's was there before it, and is hidden by it."""
    known = {one.id: one for one in mounts}  # each once, so no two lead to one another
    above: dict[int, list[Mount]] = defaultdict(list)
    for one in known.values():
        above[one.parent if one.parent in known and one.parent != one.id else _BOTTOM.id].append(one)
    current = _BOTTOM
    while steps := [one for one in above[current.id] if _inside(top, one.at)]:
        current = min(steps, key=lambda one: len(one.at))
    found = {b"": current.place(top)}
    todo = [(current, top)]
    while todo:
        mount, point = todo.pop()
        here = [one for one in above[mount.id] if _inside(one.at, point)]
        for one in here:
            if any(other is not one and _inside(one.at, other.at) for other in here):
                continue
            todo.append((one, one.at))
            place = one.place(one.at)
            if place != mount.place(one.at):  # else a mount of what is there onto itself
                found[one.at[len(top) :].strip(b"/")] = place
    return found


class MountTable:
    """The node's mounts, read when they have changed. What is in here blocks; call it from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._watched = -1
        self._mounts: list[Mount] = []
        self._answers: dict[str, Places] = {}  # since the mounts were read

    def kind(self, device: int) -> str:
        """A mounted file system's type by its number, "" if there is none. :raise OSError: as `places`."""
        number = f"{os.major(device)}:{os.minor(device)}"
        with self._lock:
            self._read()
            return next((one.kind for one in self._mounts if one.device == number), "")

    def places(self, path: str) -> Places:
        """As the function of that name, at this moment. :raise OSError: the table can't be read."""
        with self._lock:
            self._read()
            if path not in self._answers:
                if len(self._answers) >= ANSWERS:
                    self._answers.clear()
                self._answers[path] = places(self._mounts, os.fsencode(path))
            return self._answers[path]

    def close(self) -> None:
        """Let go of what tells changes. A later look opens it again."""
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
            self._answers.clear()


def moved(before: Places, now: Places) -> frozenset[bytes]:
    """Where in a directory something else is than was before."""
    return frozenset(path for path in {*before, *now} if before.get(path) != now.get(path))


def outermost_writable(places: Places) -> list[bytes]:
    """The mount points below a directory that can be written to, but those in one another."""
    found: list[bytes] = []
    for path in sorted(places):
        if path and places[path].writable and not any(_inside(path, one) for one in found):
            found.append(path)
    return found


def as_before(found: Manifest, before: Manifest, moved: frozenset[bytes]) -> Manifest:
    """`found`, but what is at one of those paths or below as it was `before`."""
    if not moved:
        return found

    def hidden(path: bytes) -> bool:
        while path not in moved:
            if not path:
                return False
            path = path.rpartition(b"/")[0]
        return True

    same = {path: entry for path, entry in found.items() if not hidden(path)}
    return {**same, **{path: entry for path, entry in before.items() if hidden(path)}}
