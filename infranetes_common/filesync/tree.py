# SPDX-License-Identifier: Apache-2.0
"""The place of a synced tree, and safe access to its files.

Nothing here leaves the tree, whatever the other side sends and whoever writes to the tree meanwhile: paths
are relative and without "..", and every component is opened without following links. The same holds for the
components of the tree's own path, because others may write to the directories it lies in.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from infranetes_common.errors import FailedPrecondition
from infranetes_common.filesync.manifest import Changed, check_path
from infranetes_common.paths import open_path

READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
DIRECTORY_FLAGS = READ_FLAGS | os.O_DIRECTORY


class Tree:
    """A directory, or a single file.

    :param path: not itself a link.
    :param file: whether it is a single file. That is written in place, since a mount is of its inode.
    :param setid: whether files written here may have set-id bits.
    :param crossing: whether file systems that are mounted below belong to it. If not, each is an empty
        directory.
    :param alive: called for each entry that is scanned, to show that the scan makes progress.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        file: bool,
        setid: bool,
        crossing: bool = True,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = os.fsencode(path)
        self.file = file
        self.setid = setid
        self.crossing = crossing
        self.alive = alive

    @contextlib.contextmanager
    def opened(self, flags: int) -> Iterator[int]:
        """Open the top.

        :raise FailedPrecondition: it is not there.
        """
        try:
            descriptor = open_path(self.path, flags)
        except OSError as error:
            raise FailedPrecondition(
                f"{os.fsdecode(self.path)} can't be looked at: {error.strerror}"
            ) from None
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def parent_of(self, path: bytes) -> Iterator[tuple[int, bytes]]:
        """Open the directory that `path` is in; also yield the name it has there.

        :raise Changed: there is no such directory.
        """
        *parts, name = check_path(path).split(b"/")
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(self.opened(DIRECTORY_FLAGS))
            for part in parts:
                try:
                    directory = os.open(part, DIRECTORY_FLAGS, dir_fd=directory)
                except OSError as error:
                    raise Changed(
                        f"{os.fsdecode(path)!r} in {os.fsdecode(self.path)}: {error.strerror}"
                    ) from None
                stack.callback(os.close, directory)
            yield directory, name
