# SPDX-License-Identifier: Apache-2.0
"""Applying the changes that come from the other side."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable

from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument, ResourceExhausted
from infranetes_common.filesync import write
from infranetes_common.filesync.manifest import (
    DIRECTORY,
    FILE,
    SYMLINK,
    Bounds,
    BoundsCheck,
    Change,
    Changed,
    Entry,
    Removed,
    Unread,
    check_entry,
    check_path,
)
from infranetes_common.filesync.tree import Tree

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NAMED = 3  # the most failed paths that a message names


class Applier:
    """Applies changes in their order. A file's content follows its entry.

    An entry that can't be written stays as it is, and the others are written. A visible link never leads to a
    missing target: after a failure no link is switched to the failed entry, and once a link was not switched,
    nothing is removed.

    :ivar failed: the reason, by path; None if the file was being written at that moment.
    """

    def __init__(self, tree: Tree, bounds: Bounds) -> None:
        self._tree = tree
        self._check = BoundsCheck(bounds, tree.path)
        self._entry: Entry | None = None  # the file whose content comes next
        self._file: write.FileWriter | None = None  # the same file; None: it has failed
        self._left = 0
        self._full = False
        self._link_held = False  # a link was not switched to its new target
        self.failed: dict[bytes, str | None] = {}

    def feed(self, changes: Iterable[Change]) -> None:
        """Apply some more changes.

        :raise InvalidArgument: one of them is invalid.
        :raise ResourceExhausted: the tree would be over its bounds.
        """
        try:
            for change in changes:
                self._take(change)
        except BaseException:
            self.abort()
            raise

    def finish(self) -> None:
        """Note that all changes were fed.

        :raise InvalidArgument: the last file is not whole; nothing of it stays.
        """
        if self._entry is not None:
            self.abort()
            raise InvalidArgument("fewer bytes than the entry of a file in a volume announced")

    def abort(self) -> None:
        """Drop the file that is being written: no more will come."""
        self._entry = None
        self._drop()

    def check_whole(self) -> None:
        """Raise the error that `error` returns, if anything failed."""
        error = self.error()
        if error is not None:
            raise error

    def error(self) -> InfranetesError | None:
        """Return the error that sums up `failed`; None if all was written.

        It is `Changed` if files were only being written at that moment, `ResourceExhausted` if there was no
        room, and `FailedPrecondition` otherwise.
        """
        top = os.fsdecode(self._tree.path)
        real = {path: why for path, why in self.failed.items() if why is not None}
        if not real:
            return Changed(f"{top} was being written") if self.failed else None
        named = [f"{os.fsdecode(path) or '.'}: {why}" for path, why in list(real.items())[:_NAMED]]
        more = f" and {len(real) - _NAMED} more" if len(real) > _NAMED else ""
        kind = ResourceExhausted if self._full else FailedPrecondition
        return kind(f"{top} can't be written whole: {'; '.join(named)}{more}")

    def _take(self, change: Change) -> None:
        if isinstance(change, bytes):
            self._content(change)
        elif isinstance(change, Unread):
            self._unread(check_path(change.path))
        elif self._entry is not None:
            raise InvalidArgument("fewer bytes than the entry of a file in a volume announced")
        elif isinstance(change, Removed):
            path = check_path(change.path)
            if self._link_held:
                self._fail(path, None)
            else:
                self._try(path, lambda: write.remove(self._tree, path))
        else:
            self._begin(check_entry(change))

    def _begin(self, entry: Entry) -> None:
        if (entry.path == b"") != (self._tree.file or (entry.kind == DIRECTORY and not entry.path)):
            raise InvalidArgument(f"{entry.path[:200]!r} has no place in this volume")
        if self._tree.file and entry.kind != FILE:
            raise InvalidArgument("this volume is a file")
        self._check.add(entry)
        if entry.kind == DIRECTORY:
            self._try(entry.path, lambda: write.make_directory(self._tree, entry))
        elif entry.kind == SYMLINK:
            self._link(entry)
        else:
            self._entry, self._left = entry, entry.size
            self._try(entry.path, lambda: self._open(entry))
            self._end_if_whole(entry)

    def _link(self, entry: Entry) -> None:
        if self._leads_to_failed(entry) and write.link_target(self._tree, entry.path) is not None:
            self._link_held = True
            self._fail(entry.path, None)
        else:
            self._try(entry.path, lambda: write.make_link(self._tree, entry))

    def _leads_to_failed(self, entry: Entry) -> bool:
        if entry.target.startswith(b"/"):
            return False
        target = os.path.normpath(os.path.join(os.path.dirname(entry.path), entry.target))
        return any(
            path == target or path.startswith(target + b"/") or target.startswith(path + b"/")
            for path in self.failed
        )

    def _open(self, entry: Entry) -> None:
        self._file = write.begin_file(self._tree, entry)

    def _content(self, data: bytes) -> None:
        entry = self._entry
        if entry is None or len(data) > self._left:
            raise InvalidArgument("more bytes than the entry of a file in a volume announced")
        self._left -= len(data)
        if self._file is not None:
            file = self._file
            self._try(entry.path, lambda: file.write(data))
        self._end_if_whole(entry)

    def _end_if_whole(self, entry: Entry) -> None:
        if self._left:
            return
        self._entry = None
        file, self._file = self._file, None
        if file is not None:
            self._try(entry.path, file.finish)

    def _unread(self, path: bytes) -> None:
        if self._entry is not None and self._entry.path != path:
            raise InvalidArgument("another file in a volume was being sent")
        self.abort()
        self._fail(path, None)

    def _try(self, path: bytes, work: Callable[[], None]) -> None:
        try:
            work()
        except (Changed, OSError) as error:
            self._drop()
            if isinstance(error, OSError):
                self._full = self._full or error.errno in _FULL
                self._fail(path, error.strerror or str(error))
            else:
                self._fail(path, None)

    def _fail(self, path: bytes, why: str | None) -> None:
        self.failed.setdefault(path, why)

    def _drop(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.abort()
