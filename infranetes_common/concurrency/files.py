# SPDX-License-Identifier: Apache-2.0
"""Files that are replaced whole or not at all, and files that one process holds.

A replacement is complete or absent also after a process was killed or a machine lost power.

Everything here blocks: call it in a thread (`run_in_thread`) where a disk's delay matters.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

SUFFIX = ".new"
"""The suffix of a file that is about to replace another. A leftover is overwritten the next time."""


def replace_file(path: Path, content: bytes | str, mode: int = 0o600, *, durable: bool = True) -> None:
    """Make `path` a file with this content and mode: after a crash it has the old content or the new one.

    The content is written beside it, synced and renamed, and the directory is synced, so once this returns
    the file outlives a loss of power. One writer per path at a time. A symbolic link is replaced itself.

    :param content: text is written as UTF-8.
    :param durable: False for files that need not outlive a loss of power, such as those below /run: nothing
        is synced, and writing does not wait for a disk.
    :raise OSError: it can't be written; the file is unchanged, and no temporary file is left. If only the
        directory can't be synced, the file is replaced.
    """
    beside = path.with_name(path.name + SUFFIX)
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)  # whatever the umask is
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if durable:
                os.fsync(descriptor)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def lock_file(path: Path) -> int:
    """Lock a file, which is made if it is missing. Returns a descriptor that holds the lock while it is open.

    :raise BlockingIOError: another descriptor holds the lock. :raise OSError: the file can't be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def sync_directory(path: Path) -> None:
    """Make the names in a directory outlive a loss of power: files made, renamed or removed in it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
