# SPDX-License-Identifier: Apache-2.0
"""Archives for the kernel's first file system, in cpio's format `newc`, written without being root."""

from __future__ import annotations

import stat
from collections.abc import Iterable

import attrs


@attrs.frozen
class Entry:
    """A file.

    :ivar mode: with its type. :ivar data: of a link, where it leads. :ivar device: major and minor.
    """

    path: str
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)


def directory(path: str) -> Entry:
    return Entry(path, stat.S_IFDIR | 0o755)


def file(path: str, data: bytes | str, mode: int = 0o644) -> Entry:
    return Entry(path, stat.S_IFREG | mode, data.encode() if isinstance(data, str) else data)


def link(path: str, target: str) -> Entry:
    return Entry(path, stat.S_IFLNK | 0o777, target.encode())


def device(path: str, major: int, minor: int) -> Entry:
    """Return an entry for a character device."""
    return Entry(path, stat.S_IFCHR | 0o600, device=(major, minor))


def archive(entries: Iterable[Entry]) -> bytes:
    """Return an archive of these files, and of the directories that they are in."""
    made: dict[str, Entry] = {}
    for entry in entries:
        parts = entry.path.split("/")
        for end in range(1, len(parts)):
            parent = "/".join(parts[:end])
            made.setdefault(parent, directory(parent))
        made[entry.path] = entry
    out = bytearray()
    for number, entry in enumerate((*made.values(), Entry("TRAILER!!!", 0)), 1):
        name = entry.path.encode() + b"\0"
        fields = (
            *(number, entry.mode, 0, 0, 1, 0, len(entry.data), 0, 0),
            *(*entry.device, len(name), 0),
        )
        out += b"070701" + b"".join(b"%08X" % field for field in fields) + name
        out += bytes(-len(out) % 4)
        out += entry.data
        out += bytes(-len(out) % 4)
    return bytes(out)
