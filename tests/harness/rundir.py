# SPDX-License-Identifier: Apache-2.0
"""The directory of a test run, which no other run in the same checkout has."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

MIN_FREE = 1 << 30  # bytes that tests need on the disk


class NoRoom(Exception):
    """The disk is too full to run tests."""


@contextlib.contextmanager
def run_directory(parent: Path) -> Iterator[Path]:
    """Take the first directory below `parent` that no run uses, and empty it. It is kept afterwards.

    Its name is short, because tests have unix sockets in it, whose paths may have 107 bytes.

    :raise NoRoom: the disk is too full.
    """
    parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(parent).free) < MIN_FREE:
        raise NoRoom(f"{parent} has {free >> 20} MiB left, and tests need {MIN_FREE >> 20}: free some space")
    for number in count():
        directory = parent / f"{number}"
        lock = os.open(parent / f"{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
                continue
            raise
        try:
            shutil.rmtree(directory, ignore_errors=True)  # what root's tests have left there may stay
            directory.mkdir(exist_ok=True)
            yield directory
            return
        finally:
            os.close(lock)
