# SPDX-License-Identifier: Apache-2.0
"""Log files by inode, so that one is found again after kubelet has renamed it.

Nothing stays open between calls, so thousands of idle logs cost no descriptors. Everything here blocks (a
full page cache makes any write wait for the disk) and is called in threads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

import attrs

MODE = 0o640
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # what is no file must not hold up the others


class Gone(Exception):
    """The file is neither at its path nor anywhere else in its directory."""


@attrs.frozen
class Found:
    """A log file on disk.

    :ivar at_path: whether it is at the log's path, not renamed.
    """

    inode: int
    size: int
    at_path: bool


class LogFiles:
    """The file system operations that a log needs. Every method may raise OSError."""

    def find(self, path: Path, inode: int) -> Found:
        """Find the file at `path` or under another name in its directory.

        :raise Gone: it is not there.
        """
        fd, at_path = _open(path, inode, os.O_RDONLY)
        try:
            return Found(inode, os.fstat(fd).st_size, at_path)
        finally:
            os.close(fd)

    def current(self, path: Path) -> Found:
        """Return the file at `path`; it and its directory are made if they are missing."""
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(parents=True, mode=0o755)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _FLAGS, MODE)
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return Found(status.st_ino, status.st_size, True)

    def at(self, path: Path) -> int:
        """Return the inode of what is at `path`; 0 if nothing is."""
        try:
            return path.lstat().st_ino
        except FileNotFoundError:
            return 0

    def append(self, path: Path, inode: int, data: bytes) -> int:
        """Append all of `data` or nothing of it, and return the file's new size.

        :raise Gone: as `find`.
        """
        fd, _ = _open(path, inode, os.O_WRONLY | os.O_APPEND)
        try:
            start = os.fstat(fd).st_size
            done = 0
            try:
                while done < len(data):
                    done += os.write(fd, data[done:] if done else data)
            except OSError:
                os.ftruncate(fd, start)
                raise
            return start + done
        finally:
            os.close(fd)

    def tail(self, path: Path, inode: int, size: int) -> bytes:
        """Return what the file has beyond its first `size` bytes.

        :raise Gone: as `find`.
        """
        fd, _ = _open(path, inode, os.O_RDONLY)
        with open(fd, "rb") as file:
            file.seek(size)
            return file.read()


def _open(path: Path, inode: int, flags: int) -> tuple[int, bool]:
    """Open the file with that inode; also say whether it is at `path`."""
    for _ in range(3):  # kubelet may rename it between the two looks
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, flags | _FLAGS)
            if os.fstat(fd).st_ino == inode:
                return fd, True
            os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(path.parent):
                if entry.inode() != inode or not entry.is_file(follow_symlinks=False):
                    continue
                fd = os.open(entry.path, flags | _FLAGS)
                if os.fstat(fd).st_ino == inode:
                    return fd, entry.name == path.name
                os.close(fd)
    raise Gone(str(path))
