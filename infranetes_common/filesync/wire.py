# SPDX-License-Identifier: Apache-2.0
"""Manifests and changes as node and agent send them to each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from infranetes_common.errors import InvalidArgument
from infranetes_common.filesync.manifest import (
    DIRECTORY,
    FILE,
    SYMLINK,
    Change,
    Entry,
    Removed,
    Unread,
    check_entry,
)
from infranetes_common.wire import vmserver

PREFIX = "infranetes-volume:"  # prefix of a mount's host_path as sent to an agent; the volume's id follows
PAGE_ENTRIES = 256  # of a manifest, per message
PAGE_BYTES = 512 * 1024  # of the entries' paths and targets, per message
BATCH_CHANGES = 256  # per message
BATCH_BYTES = 512 * 1024  # of files' content, per message

_KINDS = {
    FILE: vmserver.VolumeEntry.FILE,
    DIRECTORY: vmserver.VolumeEntry.DIRECTORY,
    SYMLINK: vmserver.VolumeEntry.SYMLINK,
}
_NAMES = {number: name for name, number in _KINDS.items()}


def to_wire(entry: Entry) -> vmserver.VolumeEntry:
    """Return the message for an entry."""
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


def from_wire(sent: vmserver.VolumeEntry) -> Entry:
    """Return the entry that a message holds.

    :raise InvalidArgument: one of its fields is out of bounds.
    """
    if sent.kind not in _NAMES:
        raise InvalidArgument(f"{sent.path[:200]!r} in a volume: neither file nor directory nor link")
    return check_entry(
        Entry(
            sent.path, _NAMES[sent.kind], sent.mode, sent.uid, sent.gid, sent.size, sent.mtime_nanos,
            sent.target,
        )
    )  # fmt: skip


def change_to_wire(change: Change) -> vmserver.VolumeChange:
    """Return the message for a change."""
    if isinstance(change, Entry):
        return vmserver.VolumeChange(entry=to_wire(change))
    if isinstance(change, Removed):
        return vmserver.VolumeChange(removed=change.path)
    if isinstance(change, Unread):
        return vmserver.VolumeChange(unread=change.path)
    return vmserver.VolumeChange(data=change)


def change_from_wire(sent: vmserver.VolumeChange) -> Change:
    """Return the change that a message holds; its paths are checked when it is applied.

    :raise InvalidArgument: it holds none, or an entry that is out of bounds.
    """
    kind = sent.WhichOneof("change")
    if kind == "entry":
        return from_wire(sent.entry)
    if kind == "removed":
        return Removed(bytes(sent.removed))
    if kind == "unread":
        return Unread(bytes(sent.unread))
    if kind == "data":
        return bytes(sent.data)
    raise InvalidArgument("an empty change of a volume")


def pages(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Divide entries into lists that fit one message each; none is empty."""
    page: list[Entry] = []
    size = 0
    for entry in entries:
        added = len(entry.path) + len(entry.target)
        if page and (len(page) >= PAGE_ENTRIES or size + added > PAGE_BYTES):
            yield page
            page, size = [], 0
        page.append(entry)
        size += added
    if page:
        yield page


def batch(changes: Iterator[Change]) -> list[Change]:
    """Take as many of the next changes as are sent at once; an empty list is the end."""
    taken: list[Change] = []
    size = 0
    for change in changes:
        taken.append(change)
        size += len(change) if isinstance(change, bytes) else 0
        if size >= BATCH_BYTES or len(taken) >= BATCH_CHANGES:
            break
    return taken
