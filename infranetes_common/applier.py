"""Changes that come from the other side, carried out in a tree."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from infranetes_common.entries import (
    DIRECTORY,
    FILE,
    SYMLINK,
    Bounds,
    Change,
    Count,
    Removed,
    check_entry,
    check_path,
)
from infranetes_common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from infranetes_common.tree import Tree, Writing


class Applier:
    """Applies changes in their order. A file's pieces follow its entry.

    :raise InvalidArgument: a change that is none. :raise ResourceExhausted: over `bounds`, or disk full.
    """

    def __init__(self, tree: Tree, bounds: Bounds) -> None:
        self._tree = tree
        self._count = Count(bounds, tree.path)
        self._writing: Writing | None = None
        self._left = 0

    def feed(self, changes: Iterable[Change]) -> None:
        """Some more."""
        try:
            for change in changes:
                self._apply(change)
        except OSError as error:
            self.abort()
            kind = ResourceExhausted if error.errno in (errno.ENOSPC, errno.EDQUOT) else FailedPrecondition
            raise kind(f"{os.fsdecode(self._tree.path)} can't be written: {error.strerror}") from None
        except BaseException:
            self.abort()
            raise

    def _apply(self, change: Change) -> None:
        if isinstance(change, bytes):
            if self._writing is None or len(change) > self._left:
                raise InvalidArgument("more bytes than the file in a volume was said to have")
            self._writing.write(change)
            self._left -= len(change)
            self._done_if_whole()
            return
        if self._writing is not None:
            raise InvalidArgument("fewer bytes than the file in a volume was said to have")
        if isinstance(change, Removed):
            self._tree.remove(check_path(change.path))
            return
        entry = check_entry(change)
        if (entry.path == b"") != (self._tree.file or (entry.kind == DIRECTORY and not entry.path)):
            raise InvalidArgument(f"{entry.path[:200]!r} has no place in this volume")
        if self._tree.file and entry.kind != FILE:
            raise InvalidArgument("this volume is a file")
        self._count.add(entry)
        if entry.kind == DIRECTORY:
            self._tree.make_directory(entry)
        elif entry.kind == SYMLINK:
            self._tree.make_link(entry)
        else:
            self._writing, self._left = self._tree.begin_file(entry), entry.size
            self._done_if_whole()

    def _done_if_whole(self) -> None:
        if self._writing is not None and not self._left:
            writing, self._writing = self._writing, None
            writing.done()

    def finish(self) -> None:
        """That was all. :raise InvalidArgument: the last file is not whole; nothing of it stays."""
        if self._writing is not None:
            self.abort()
            raise InvalidArgument("fewer bytes than the file in a volume was said to have")

    def abort(self) -> None:
        """No more will come."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.abort()
