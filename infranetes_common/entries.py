"""What a file or directory that is carried consists of: values that both sides check before they use them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import Any

import attrs

from infranetes_common.errors import InvalidArgument, ResourceExhausted, Unavailable

FILE, DIRECTORY, SYMLINK = "file", "directory", "symlink"
KINDS = (FILE, DIRECTORY, SYMLINK)
MAX_PATH = 4096
MAX_NAME = 255
MAX_DEPTH = 128
TEMPORARY = b".infranetes-"  # what is half written; never carried
SETID = stat.S_ISUID | stat.S_ISGID


class Changed(Unavailable):
    """It is being written at this moment: look again."""


@attrs.frozen
class Bounds:
    """What is carried at most."""

    entries: int
    bytes: int


@attrs.frozen
class Entry:
    """A file, directory or link. Its `path` is relative, b"" the top itself; `mtime` in ns since 1970."""

    path: bytes
    kind: str
    mode: int
    uid: int
    gid: int
    size: int = 0
    mtime: int = 0
    target: bytes = b""

    @property
    def key(self) -> tuple[Any, ...]:
        """What is equal for two that need no carrying. Bits that no VM may set count for nothing."""
        if self.kind == FILE:
            return (FILE, self.mode & ~SETID, self.uid, self.gid, self.size, self.mtime)
        if self.kind == DIRECTORY:
            return (DIRECTORY, self.mode, self.uid, self.gid)
        return (SYMLINK, self.uid, self.gid, self.target)


Manifest = dict[bytes, Entry]


@attrs.frozen
class Removed:
    """What was at `path` is no more."""

    path: bytes


Change = Entry | Removed | bytes  # bytes: the next piece of the file that was named last


def check_path(path: bytes) -> bytes:
    """`path`, if it can't lead out of a directory. :raise InvalidArgument: it can, or is too long."""
    if path:
        parts = path.split(b"/")
        if (
            len(path) > MAX_PATH
            or len(parts) > MAX_DEPTH
            or b"\0" in path
            or any(part in (b"", b".", b"..") or len(part) > MAX_NAME for part in parts)
        ):
            raise InvalidArgument(f"{path[:200]!r} is no path within a volume")
        if any(part.startswith(TEMPORARY) for part in parts):
            raise InvalidArgument(f"{path[:200]!r}: such names are kept for files half written")
    return path


def check_entry(entry: Entry) -> Entry:
    """`entry`, if it is one. :raise InvalidArgument: out of bounds; says how."""
    check_path(entry.path)
    words = f"{entry.path[:200]!r} in a volume"
    if entry.kind not in KINDS:
        raise InvalidArgument(f"{words}: neither file nor directory nor link")
    if not 0 <= entry.mode <= 0o7777:
        raise InvalidArgument(f"{words}: mode {entry.mode:o}")
    if not (0 <= entry.uid < 2**32 - 1 and 0 <= entry.gid < 2**32 - 1 and 0 <= entry.size < 2**63):
        raise InvalidArgument(f"{words}: owner or size out of bounds")
    if not 0 <= entry.mtime < 2**63:
        raise InvalidArgument(f"{words}: a time out of bounds")
    if entry.kind == SYMLINK:
        if not 0 < len(entry.target) < MAX_PATH or b"\0" in entry.target:
            raise InvalidArgument(f"{words}: a link to nowhere")
    elif entry.target:
        raise InvalidArgument(f"{words}: no link, but a target")
    return entry


def ordered(entries: Iterable[Entry]) -> list[Entry]:
    """As they are to be applied: directories and files by path, then links, those being what makes a new
    state of them the one that is seen."""
    return sorted(entries, key=lambda one: (one.kind == SYMLINK, one.path))


def entry_of(path: bytes, found: os.stat_result, target: bytes = b"") -> Entry | None:
    """What was found at `path`, None: a socket, device or pipe."""
    mode, uid, gid = stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid
    if stat.S_ISREG(found.st_mode):
        return Entry(path, FILE, mode, uid, gid, found.st_size, max(found.st_mtime_ns, 0))
    if stat.S_ISDIR(found.st_mode):
        return Entry(path, DIRECTORY, mode, uid, gid)
    if stat.S_ISLNK(found.st_mode):
        return Entry(path, SYMLINK, mode, uid, gid, target=target)
    return None


class Count:
    """Of what is carried, so that it stays within bounds."""

    def __init__(self, bounds: Bounds, path: bytes) -> None:
        self._bounds = bounds
        self._path = os.fsdecode(path)
        self._entries = 0
        self._bytes = 0

    def add(self, entry: Entry) -> None:
        """One more. :raise ResourceExhausted: that is too much."""
        self._entries += 1
        self._bytes += entry.size
        if self._entries > self._bounds.entries:
            raise ResourceExhausted(f"{self._path} has over {self._bounds.entries} files and directories")
        if self._bytes > self._bounds.bytes:
            raise ResourceExhausted(f"{self._path} has over {self._bounds.bytes} bytes")
