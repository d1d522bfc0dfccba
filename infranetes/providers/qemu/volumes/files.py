# SPDX-License-Identifier: Apache-2.0
"""The files of volumes: one directory, `ID.raw`. Only what is written to takes room.

The directory is all that is known of them. A file appears whole, under its name. A person may put more
there: files, and links to block devices of the node, which are attached as they are.

file         what it is
ID.raw       a volume
ID.source    what it began with, if that was a snapshot or another volume
ID.root      the image whose disk it was filled with, if it is a VM's root (see `roots`)
ID.raw.new   a volume that is being made; what a killed daemon has left is removed by the next one

Everything here blocks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from infranetes.providers.qemu.volumes.room import Room, check_size
from infranetes.providers.volumes import MAX_NAME, FromSnapshot, FromVolume, VolumeDisk, VolumeSource
from infranetes_common.concurrency import replace_file, sync_directory
from infranetes_common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OutOfRange,
    ResourceExhausted,
    Unavailable,
)

MODE = 0o600
_SUFFIX = ".raw"
_SOURCE = ".source"
_ROOT = ".root"
_NEW = ".new"  # after the suffix: a file that is being made
_ID = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_HASHED = "name-"


def id_of(name: str) -> str:
    """Return the id of the volume, or snapshot, of a name: the name itself, if that can be a file's.

    :raise InvalidArgument: nothing can have the name."""
    if not 0 < len(name.encode()) <= MAX_NAME:
        raise InvalidArgument(f"a volume's name has 1 to {MAX_NAME} bytes")
    if _ID.fullmatch(name) and not name.startswith(_HASHED):
        return name
    return _HASHED + hashlib.sha256(name.encode()).hexdigest()[:40]


def is_id(text: str) -> bool:
    """Return whether a volume, or snapshot, can have this id here."""
    return _ID.fullmatch(text) is not None


@attrs.frozen
class RootRecord:
    """What is known of a volume that is a root.

    :ivar digest: of the image's disk. :ivar whole: whether all of that is there; otherwise it is, or was,
        being filled."""

    digest: str
    whole: bool


class VolumeFiles:
    """The files. Its methods block, and no two of those that change something may run at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._room = Room(directory)

    def path(self, volume_id: str) -> Path:
        """Return the file of a volume, which need not be there. :raise NotFound: none can have this id."""
        if not _ID.fullmatch(volume_id):
            raise _no_volume(volume_id)
        return self.directory / f"{volume_id}{_SUFFIX}"

    def existing(self, volume_id: str) -> Path:
        """Return the file of a volume. :raise NotFound: there is none."""
        self.get(volume_id)
        return self.path(volume_id)

    def create(self, name: str, size: int) -> VolumeDisk:
        volume_id = id_of(name)
        try:
            return self.get(volume_id)
        except NotFound:
            pass
        check_size(size)
        self._room.check(self.free(), size)
        path = self.path(volume_id)
        new = path.with_name(path.name + _NEW)
        try:
            new.unlink(missing_ok=True)
            # Left by a volume whose file a person has removed.
            self._forget(volume_id)
            write_file(new, size)
            new.replace(path)
            sync_directory(self.directory)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise as_error(error, f"volume {volume_id} can't be made in {self.directory}") from None
        return VolumeDisk(volume_id, size)

    def begin(self, volume_id: str, size: int) -> Path:
        """Begin a volume that the caller fills. Return the file, which is not there yet, and for which room
        is kept until it is finished or dropped."""
        check_size(size)
        new = self._new(volume_id)
        try:
            new.unlink(missing_ok=True)
        except OSError as error:
            raise as_error(error, f"volume {volume_id} can't be made in {self.directory}") from None
        self.keep(new, size)
        return new

    def finish(
        self, volume_id: str, size: int, source: VolumeSource, root: RootRecord | None = None
    ) -> VolumeDisk:
        """Make a volume of the file that was begun. :param root: what is known of its content as a root."""
        new = self._new(volume_id)
        kind = "snapshot" if isinstance(source, FromSnapshot) else "volume"
        try:
            write_file(new, size)
            self._forget(volume_id)
            replace_file(self._source(volume_id), json.dumps({kind: source.id}))
            if root is not None:
                self.put_root(volume_id, root)
            new.replace(self.path(volume_id))
            sync_directory(self.directory)
        except OSError as error:
            raise as_error(error, f"volume {volume_id} can't be made in {self.directory}") from None
        self._room.release(new)
        return VolumeDisk(volume_id, size, source=source)

    def drop(self, volume_id: str) -> None:
        """Remove a file that was begun. Idempotent; what can't be removed now is one of the `rests`."""
        new = self._new(volume_id)
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        self._room.release(new)

    def keep(self, path: Path, size: int) -> None:
        """Keep room for a file, of this size in all. :raise ResourceExhausted: there is none."""
        try:
            self._room.keep(path, size, self._paths())
        except OSError as error:
            raise as_error(error, f"{self.directory} can't be looked at") from None

    def release(self, path: Path) -> None:
        """Keep no more room for a file. Idempotent."""
        self._room.release(path)

    def rests(self) -> list[Path]:
        """Return the files that a killed daemon left of volumes that were being made."""
        try:
            names = sorted(os.listdir(self.directory))
        except FileNotFoundError:
            return []
        found = []
        for name in names:
            stem = name.removesuffix(_NEW)
            kind = next((each for each in (_SUFFIX, _SOURCE, _ROOT) if stem.endswith(each)), "")
            volume_id = stem.removesuffix(kind)
            if not kind or not is_id(volume_id):
                continue
            alone = kind != _SUFFIX and not self.path(volume_id).exists()
            if alone or name != stem:
                found.append(self.directory / name)
        return found

    def to_copy(self, volume_id: str) -> Path:
        """Return the file of a volume that is to be copied.

        :raise NotFound: there is none. :raise FailedPrecondition: it is a device of the node."""
        path = self.existing(volume_id)
        if path.is_symlink() or not path.is_file():
            raise FailedPrecondition(
                f"volume {volume_id} is a device of the node, of which there are neither snapshots nor "
                "copies: use what the device has for that, such as LVM"
            )
        return path

    def delete(self, volume_id: str) -> None:
        if not _ID.fullmatch(volume_id):
            return
        path = self.path(volume_id)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise FailedPrecondition(
                    f"volume {volume_id} is a device of the node, which is not destroyed: remove the link "
                    f"{path} if nothing is to use it any more"
                ) from None
            raise as_error(error, f"volume {volume_id} can't be deleted") from None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise FailedPrecondition(f"{path} is no file: it has to be removed by hand")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no VM can attach it from now on
            path.unlink(missing_ok=True)
            self._forget(volume_id)
            sync_directory(self.directory)
        except BlockingIOError:
            raise FailedPrecondition(
                f"volume {volume_id} is attached to a VM: it can be deleted once its pod is gone"
            ) from None
        except OSError as error:
            raise as_error(error, f"volume {volume_id} can't be deleted") from None
        finally:
            os.close(descriptor)

    def expand(self, volume_id: str, size: int) -> VolumeDisk:
        found = self.get(volume_id)
        if found.size >= size:
            return found
        path = self.path(volume_id)
        if path.is_symlink():
            raise FailedPrecondition(f"volume {volume_id} is a device of the node: make that larger")
        check_size(size)
        self._room.check(self.free(), size - found.size)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.ftruncate(descriptor, size)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise as_error(error, f"volume {volume_id} can't be made larger") from None
        return attrs.evolve(found, size=size)

    def get(self, volume_id: str) -> VolumeDisk:
        path = self.path(volume_id)
        try:
            size = _size(path)
        except FileNotFoundError:
            raise _no_volume(volume_id) from None
        except OSError as error:
            raise as_error(error, f"volume {volume_id} can't be looked at ({path})") from None
        if size is None:
            raise _no_volume(volume_id)
        return VolumeDisk(volume_id, size, source=self._began_with(volume_id))

    def root(self, volume_id: str) -> RootRecord | None:
        """Return what is known of a volume as a root; None: nothing.

        :raise OSError: that can't be read. :raise FailedPrecondition: it can't be understood."""
        path = self._root(volume_id)
        try:
            match json.loads(path.read_text()):
                case {"image": str(digest), "whole": bool(whole)}:
                    return RootRecord(digest, whole)
        except FileNotFoundError:
            return None
        except ValueError:
            pass
        raise FailedPrecondition(
            f"{path} does not say what volume {volume_id} was made of; remove it, and the volume counts as "
            "one that is no root"
        )

    def put_root(self, volume_id: str, record: RootRecord) -> None:
        """Record what a volume is as a root, so that it is still known after a loss of power.

        :raise OSError: it can't be written; what was recorded before is still there."""
        content = json.dumps({"image": record.digest, "whole": record.whole})
        replace_file(self._root(volume_id), content)

    def all(self) -> list[VolumeDisk]:
        found = []
        for volume_id in self._ids():
            try:
                found.append(self.get(volume_id))
            except NotFound:
                continue  # deleted meanwhile, or no volume
        return found

    def free(self) -> int:
        """Return the free bytes that no volume is promised: all volumes can be filled."""
        try:
            return self._room.free(self._paths())
        except OSError as error:
            raise as_error(error, f"{self.directory} can't be looked at") from None

    def _paths(self) -> list[Path]:
        return [self.path(volume_id) for volume_id in self._ids()]

    def _ids(self) -> Iterator[str]:
        try:
            names = sorted(os.listdir(self.directory))
        except FileNotFoundError:
            return
        for name in names:
            if name.endswith(_SUFFIX) and _ID.fullmatch(name.removesuffix(_SUFFIX)):
                yield name.removesuffix(_SUFFIX)

    def _new(self, volume_id: str) -> Path:
        path = self.path(volume_id)
        return path.with_name(path.name + _NEW)

    def _source(self, volume_id: str) -> Path:
        return self.directory / f"{volume_id}{_SOURCE}"

    def _root(self, volume_id: str) -> Path:
        return self.directory / f"{volume_id}{_ROOT}"

    def _forget(self, volume_id: str) -> None:
        """Remove what is known of a volume beside its file."""
        self._source(volume_id).unlink(missing_ok=True)
        self._root(volume_id).unlink(missing_ok=True)

    def _began_with(self, volume_id: str) -> VolumeSource | None:
        try:
            found = json.loads(self._source(volume_id).read_text())
        except (OSError, ValueError):
            return None
        match found:
            case {"snapshot": str(source)}:
                return FromSnapshot(source)
            case {"volume": str(source)}:
                return FromVolume(source)
        return None


def write_file(path: Path, size: int) -> None:
    """Make a file of this size that only root can read, and that survives a loss of power."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, MODE)
    try:
        os.fchmod(descriptor, MODE)  # whatever the umask is
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_rests(rests: Iterable[Path]) -> None:
    """Remove files and directories that a killed daemon has left, as far as that is possible."""
    for path in rests:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _size(path: Path) -> int | None:
    """Return the size of a file or block device; None: it is neither."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        kind = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(kind) and not stat.S_ISBLK(kind):
            return None
        return os.lseek(descriptor, 0, os.SEEK_END)
    finally:
        os.close(descriptor)


def _no_volume(volume_id: str) -> NotFound:
    return NotFound(f"there is no volume {volume_id[:80]!r} on this node")


def as_error(error: OSError, what: str) -> ResourceExhausted | OutOfRange | Unavailable | FailedPrecondition:
    """Return the error for a caller."""
    words = f"{what}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceExhausted(words)
    if error.errno == errno.EFBIG:
        return OutOfRange(words)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR):
        return FailedPrecondition(words)
    return Unavailable(words)
