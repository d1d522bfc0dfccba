# SPDX-License-Identifier: Apache-2.0
"""The archive of a checkpoint: a tar that is there as a whole, or not at all.

It has no name until it is complete and on the disk, so a daemon that is killed leaves nothing of it.
Everything here blocks.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import BinaryIO

import attrs

from infranetes_common.concurrency import sync_directory
from infranetes_common.errors import (
    AlreadyExists,
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)

MODE = 0o600
_MOST_NAME = 255  # bytes of a file's name
_MOST_PATH = 4095
_SPARE = 1 << 20  # for headers, and the small files
_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


@attrs.frozen
class Measured:
    """A file in an archive."""

    size: int
    sha256: str


def checked_location(location: str) -> Path:
    """Return the path that a request gives. :raise InvalidArgument: no file can have it."""
    path = Path(location)
    if not path.is_absolute() or not path.name or location != str(path) or ".." in path.parts:
        raise InvalidArgument(f"location {location[:200]!r} is no absolute path of a file without . and ..")
    if not location.isprintable() or len(path.name.encode()) > _MOST_NAME or len(location) > _MOST_PATH:
        raise InvalidArgument(f"location {location[:200]!r} can be no file: too long, or not printable")
    return path


def check_free(path: Path, size: int) -> None:
    """Check that an archive can be written to `path`.

    :param size: the sum of its files.
    :raise InfranetesError: something has the name, or there is no directory, or no room."""
    try:
        with _directory(path) as directory:
            try:
                os.stat(path.name, dir_fd=directory, follow_symlinks=False)
            except FileNotFoundError:
                pass
            else:
                raise AlreadyExists(f"{path} is there already: remove it, or give another location")
            room = os.fstatvfs(directory)
            if (free := room.f_bavail * room.f_frsize) < size + _SPARE:
                raise ResourceExhausted(
                    f"{path.parent} has {free >> 20} MiB free, and the checkpoint takes {size >> 20} MiB: "
                    "make room"
                )
    except OSError as error:
        raise _as_error(path, error) from None


class Archive:
    """A tar that is being written to a file without a name. :ivar files: those that it has by now."""

    def __init__(self, file: BinaryIO, unwanted: Event) -> None:
        self.files: dict[str, Measured] = {}
        self._tar = tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115
        self._unwanted = unwanted

    def add(self, name: str, path: Path, mtime: float) -> None:
        """Add a file of the node. :raise OSError: it can't be read, or there is no room."""
        with path.open("rb") as file:
            self._add(name, os.fstat(file.fileno()).st_size, file, mtime)

    def add_bytes(self, name: str, content: bytes, mtime: float) -> None:
        """Add a file with this content. :raise OSError: there is no room."""
        self._add(name, len(content), io.BytesIO(content), mtime)

    def close(self) -> None:
        """Write the archive's end. :raise OSError: there is no room."""
        self._tar.close()

    def _add(self, name: str, size: int, file: BinaryIO | io.BytesIO, mtime: float) -> None:
        about = tarfile.TarInfo(name)
        about.size, about.mode, about.mtime = size, MODE, mtime
        measured = _Measuring(file, self._unwanted)
        self._tar.addfile(about, measured)  # type: ignore[arg-type]  # only `read` is called
        self.files[name] = Measured(size, measured.digest.hexdigest())


class _Measuring:
    """A file that is read, and measured meanwhile."""

    def __init__(self, file: BinaryIO | io.BytesIO, unwanted: Event) -> None:
        self._file = file
        self._unwanted = unwanted
        self.digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        if self._unwanted.is_set():
            raise Unavailable("the checkpoint is no longer wanted")
        data = self._file.read(size)
        self.digest.update(data)
        return data


def thd_write(path: Path, unwanted: Event, fill: Callable[[Archive], None]) -> int:
    """Write an archive to `path`; return its size. :param unwanted: set when nobody wants it any more.

    :raise InfranetesError: it can't be written; nothing of it is there."""
    try:
        with _directory(path) as directory:
            descriptor = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, MODE, dir_fd=directory)
            with os.fdopen(descriptor, "w+b") as file:
                archive = Archive(file, unwanted)
                fill(archive)
                archive.close()
                file.flush()
                os.fchmod(descriptor, MODE)
                os.fsync(descriptor)
                size = os.fstat(descriptor).st_size
                unnamed = f"/proc/self/fd/{descriptor}"
                os.link(unnamed, path.name, dst_dir_fd=directory, follow_symlinks=True)
            sync_directory(path.parent)
        return size
    except OSError as error:
        raise _as_error(path, error) from None


@contextmanager
def _directory(path: Path) -> Iterator[int]:
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _as_error(path: Path, error: OSError) -> InfranetesError:
    what = f"the checkpoint can't be written to {path}: {error.strerror}"
    if error.errno == errno.EEXIST:
        return AlreadyExists(f"{path} is there already: remove it, or give another location")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ResourceExhausted(f"{what}; make room")
    if error.errno in _UNNAMED and path.parent.is_dir():
        return FailedPrecondition(f"{what}: the file system has to be ext4, xfs, btrfs or tmpfs, say")
    return FailedPrecondition(f"{what}; give a file in a directory that the daemon can write to")
