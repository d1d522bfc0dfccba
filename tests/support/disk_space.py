# SPDX-License-Identifier: Apache-2.0
"""Copies and directories that take no more of the disk than they have to, and no longer."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import tempfile
from pathlib import Path

import attrs

from infranetes.guest import image as images

_PLACE = Path("/var/tmp")  # not in memory, and on a disk even where the tree is on an overlay


def copy(source: Path, target: Path) -> None:
    """Copy a file or a directory, whose owners stay. Blocks.

    Holes stay holes, of which a disk of a VM has gigabytes, and both share what is the same where the file
    system can do that.
    """
    subprocess.run(["cp", "--archive", "--sparse=always", "--reflink=auto", source, target], check=True)


def copy_image(source: Path, target: Path) -> None:
    """Copy the guest image in use, without the older ones that lie beside it. Blocks.

    :param source: a directory of guest images. :param target: the directory of them to be made.
    """
    made = images.current(source)
    target.mkdir(parents=True)
    copy(made.directory, target / made.directory.name)
    (target / images.CURRENT).symlink_to(made.directory.name)


@attrs.frozen
class Scratch:
    """A directory of this process, until `remove`, or if it is killed, until the next of its kind is made."""

    path: Path
    _lock: int

    @classmethod
    def make(cls, kind: str, place: Path = _PLACE) -> Scratch:
        """Make a directory with a short path, and remove those of this kind whose processes were killed."""
        for left in place.glob(f"infranetes-{kind}-*"):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                cls(left, _locked(left)).remove()
        # It has a name of this kind only once it is locked.
        new = Path(tempfile.mkdtemp(prefix="infranetes-new-", dir=place))
        lock = _locked(new)
        path = place / new.name.replace("new", kind, 1)
        new.rename(path)
        return cls(path, lock)

    def remove(self) -> None:
        """Remove it with what is in it, but not what is mounted there."""
        try:
            command = ["rm", "--recursive", "--force", "--one-file-system", str(self.path)]
            subprocess.run(command, check=True, capture_output=True)
        finally:
            os.close(self._lock)


def _locked(directory: Path) -> int:
    """Lock a directory of this user. Returns the descriptor that holds the lock.

    :raise OSError: it is gone, it is somebody else's, or another process holds its lock.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(f"{directory} is somebody else's")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
