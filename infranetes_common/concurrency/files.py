# SPDX-License-Identifier: Apache-2.0
"""Files that are replaced whole or not at all, and files that one process holds.

A replacement is complete or absent also after a process was killed or a machine lost power.

What is no coroutine here blocks: call it in a thread (`run_in_thread`) where a disk's delay matters.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from twisted.internet.interfaces import IReactorTime

from infranetes_common.concurrency.backoff import backoff
from infranetes_common.concurrency.flight import sleep

SUFFIX = ".new"
"""The suffix of a file that is about to replace another. A leftover is overwritten the next time."""

_LOCK_PAUSES = (0.02, 0.25)  # seconds, the first and the longest


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


async def lock_file_within(clock: IReactorTime, path: Path, seconds: float) -> int:
    """Lock a file as `lock_file` does, once nobody else holds it, which may take some seconds.

    A process that is killed while it starts another leaves its locks to that one, until that executes its
    program. So whoever may follow a killed process waits.

    :raise BlockingIOError: another descriptor still holds the lock. :raise OSError: the file can't be opened.
    """
    waited, pauses = 0.0, backoff(*_LOCK_PAUSES)
    while True:
        try:
            return lock_file(path)
        except BlockingIOError:
            if waited >= seconds:
                raise
        pause = next(pauses)
        await sleep(clock, pause)
        waited += pause


def sync_directory(path: Path) -> None:
    """Make the names in a directory outlive a loss of power: files made, renamed or removed in it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
