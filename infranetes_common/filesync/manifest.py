# SPDX-License-Identifier: Apache-2.0
"""The content of a tree as values, which are checked before use because they come from the other side."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import TypeAlias

import attrs

from infranetes_common.errors import InvalidArgument, ResourceExhausted, Unavailable

FILE, DIRECTORY, SYMLINK = "file", "directory", "symlink"
KINDS = (FILE, DIRECTORY, SYMLINK)
MAX_PATH = 4096
MAX_NAME = 255
MAX_DEPTH = 128
TEMPORARY = b".infranetes-"  # prefix of half-written files, which are never synced
SETID = stat.S_ISUID | stat.S_ISGID


class Changed(Unavailable):
    """The tree is being written to at this moment; scan it again."""


@attrs.frozen
class Bounds:
    """The limits on a tree's size."""

    entries: int
    bytes: int


Key: TypeAlias = tuple[str, int, int, int, int, int] | tuple[str, int, int, int] | tuple[str, int, int, bytes]


@attrs.frozen
class Entry:
    """A file, directory or symbolic link.

    :ivar path: relative; b"" is the top itself.
    :ivar mtime: nanoseconds since 1970 UTC; files only.
    :ivar target: of a symbolic link.
    """

    path: bytes
    kind: str
    mode: int
    uid: int
    gid: int
    size: int = 0
    mtime: int = 0
    target: bytes = b""

    @property
    def key(self) -> Key:
        """The attributes to compare: entries with equal ones need no syncing. Omits bits no VM may set."""
        if self.kind == FILE:
            return (FILE, self.mode & ~SETID, self.uid, self.gid, self.size, self.mtime)
        if self.kind == DIRECTORY:
            return (DIRECTORY, self.mode & ~stat.S_ISUID, self.uid, self.gid)
        return (SYMLINK, self.uid, self.gid, self.target)


Manifest: TypeAlias = dict[bytes, Entry]
"""All entries of a tree, by path."""


@attrs.frozen
class Removed:
    """The removal of whatever was at `path`."""

    path: bytes


@attrs.frozen
class Unread:
    """The file at `path` could not be read to its end: the receiver keeps what it has."""

    path: bytes


Change: TypeAlias = Entry | Removed | Unread | bytes
"""One step of a sync; bytes are the next part of the file whose entry came last."""


def check_path(path: bytes) -> bytes:
    """Return `path` if it can't lead out of a directory.

    :raise InvalidArgument: it can, or it is too long.
    """
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
            raise InvalidArgument(f"{path[:200]!r}: such names are kept for half-written files")
    return path


def check_entry(entry: Entry) -> Entry:
    """Return `entry` if each of its fields is within bounds.

    :raise InvalidArgument: one is not; the message says which.
    """
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
    """Sort entries in the order to write them: directories and files by path, then symbolic links.

    Links come last because switching one is how a writer such as kubelet makes a new state visible.
    """
    return sorted(entries, key=lambda one: (one.kind == SYMLINK, one.path))


def entry_of(path: bytes, status: os.stat_result, target: bytes = b"") -> Entry | None:
    """Return the entry for a file's status; None for a socket, device or pipe."""
    mode, uid, gid = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
    if stat.S_ISREG(status.st_mode):
        return Entry(path, FILE, mode, uid, gid, status.st_size, max(status.st_mtime_ns, 0))
    if stat.S_ISDIR(status.st_mode):
        return Entry(path, DIRECTORY, mode, uid, gid)
    if stat.S_ISLNK(status.st_mode):
        return Entry(path, SYMLINK, mode, uid, gid, target=target)
    return None


class BoundsCheck:
    """Adds up a tree's entries and bytes, and fails once they are over its bounds.

    :param path: of the tree, for the message.
    """

    def __init__(self, bounds: Bounds, path: bytes) -> None:
        self._bounds = bounds
        self._path = os.fsdecode(path)
        self._entries = 0
        self._bytes = 0

    def add(self, entry: Entry) -> None:
        """Count one more entry.

        :raise ResourceExhausted: that is one too many.
        """
        self._entries += 1
        self._bytes += entry.size
        if self._entries > self._bounds.entries:
            raise ResourceExhausted(f"{self._path} has over {self._bounds.entries} files and directories")
        if self._bytes > self._bounds.bytes:
            raise ResourceExhausted(f"{self._path} has over {self._bounds.bytes} bytes")
