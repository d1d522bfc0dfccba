# SPDX-License-Identifier: Apache-2.0
"""Volumes of VMs of this node: raw files in one directory, `ID.raw`. Only what is written to takes room.

The directory is all that is known of them. A file appears whole, under its name. A person may put more
there: files, and links to block devices of the node, which are attached as they are.

Whoever attaches a volume to a VM has its file locked (flock) for as long as the VM has it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from twisted.internet.defer import DeferredLock
from zope.interface import implementer

from infranetes.providers.qemu.attached import VolumeAttacher
from infranetes.providers.volumes import MAX_NAME, IVolumes, VolumeDisk
from infranetes_common.concurrency import deferred, run_in_thread, shielded, sync_directory
from infranetes_common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OutOfRange,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.reactors import IReactor

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TOPOLOGY = "infranetes.io/node"
UNIT = 1 << 20
MAX_SIZE = 1 << 46  # 64 TiB
_SUFFIX = ".raw"
_NEW = ".new"  # after the suffix: a file that is being made
_MODE = 0o600
_ID = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_HASHED = "name-"
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


@implementer(IVolumes)
class QemuVolumes:
    """See `IVolumes`. Calls are served one after the other.

    :param directory: made when first needed. :param node: the node's name. :param attacher: has the VMs."""

    unit = UNIT

    def __init__(self, reactor: IReactor, directory: Path, node: str, attacher: VolumeAttacher) -> None:
        self._reactor = reactor
        self._attacher = attacher
        self._files = VolumeFiles(directory)
        self._lock = DeferredLock()
        self.topology: Mapping[str, str] = {TOPOLOGY: label(node)}

    @deferred
    async def create(self, name: str, size: int) -> VolumeDisk:
        return await shielded(self._alone(self._files.create, name, size))

    @deferred
    async def delete(self, volume_id: str) -> None:
        await shielded(self._alone(self._files.delete, volume_id))

    @deferred
    async def expand(self, volume_id: str, size: int) -> VolumeDisk:
        return await shielded(self._expand(volume_id, size))

    async def _expand(self, volume_id: str, size: int) -> VolumeDisk:
        disk = await self._alone(self._files.expand, volume_id, size)
        await self._attacher.grown(volume_id, disk.size)  # also where an earlier call got no further
        return disk

    @deferred
    async def get(self, volume_id: str) -> VolumeDisk:
        return await run_in_thread(self._reactor, self._files.get, volume_id)

    @deferred
    async def list(self) -> list[VolumeDisk]:
        return await run_in_thread(self._reactor, self._files.all)

    @deferred
    async def free(self) -> int:
        return await self._alone(self._files.free)

    @deferred
    async def attach(self, instance_id: str, volume_id: str, read_only: bool) -> str:
        path = await run_in_thread(self._reactor, self._files.existing, volume_id)
        return await self._attacher.attach(instance_id, volume_id, path, read_only)

    @deferred
    async def detach(self, instance_id: str, volume_id: str) -> None:
        await self._attacher.detach(instance_id, volume_id)

    async def _alone(self, work: Callable[[*Ts], T], *arguments: *Ts) -> T:
        async with self._lock:
            return await run_in_thread(self._reactor, work, *arguments)


def label(node: str) -> str:
    """A node's name as a value of one of Kubernetes' labels."""
    return node if _LABEL.fullmatch(node) else "node-" + hashlib.sha256(node.encode()).hexdigest()[:40]


def id_of(name: str) -> str:
    """The id of the volume of a name: the name itself, if that can be a file's."""
    if _ID.fullmatch(name) and not name.startswith(_HASHED):
        return name
    return _HASHED + hashlib.sha256(name.encode()).hexdigest()[:40]


class VolumeFiles:
    """The files. Its methods block, and no two of those that change something may run at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, volume_id: str) -> Path:
        """The file of a volume, which need not be there. :raise NotFound: none can have this id."""
        if not _ID.fullmatch(volume_id):
            raise _no_volume(volume_id)
        return self._directory / f"{volume_id}{_SUFFIX}"

    def existing(self, volume_id: str) -> Path:
        """The file of a volume. :raise NotFound: there is none."""
        self.get(volume_id)
        return self.path(volume_id)

    def create(self, name: str, size: int) -> VolumeDisk:
        if not 0 < len(name.encode()) <= MAX_NAME:
            raise InvalidArgument(f"a volume's name has 1 to {MAX_NAME} bytes")
        volume_id = id_of(name)
        try:
            return self.get(volume_id)
        except NotFound:
            pass
        self._check_room(size, size)
        path = self.path(volume_id)
        new = path.with_name(path.name + _NEW)
        try:
            new.unlink(missing_ok=True)
            descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
            try:
                os.fchmod(descriptor, _MODE)  # whatever the umask is
                os.ftruncate(descriptor, size)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            new.replace(path)
            sync_directory(self._directory)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise _as_error(error, f"volume {volume_id} can't be made in {self._directory}") from None
        return VolumeDisk(volume_id, size)

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
            raise _as_error(error, f"volume {volume_id} can't be deleted") from None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise FailedPrecondition(f"{path} is no file: nothing but a person may remove it")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody attaches it from now on
            path.unlink(missing_ok=True)
            sync_directory(self._directory)
        except BlockingIOError:
            raise FailedPrecondition(
                f"volume {volume_id} is attached to a VM: it can be deleted once its pod is gone"
            ) from None
        except OSError as error:
            raise _as_error(error, f"volume {volume_id} can't be deleted") from None
        finally:
            os.close(descriptor)

    def expand(self, volume_id: str, size: int) -> VolumeDisk:
        found = self.get(volume_id)
        if found.size >= size:
            return found
        path = self.path(volume_id)
        if path.is_symlink():
            raise FailedPrecondition(f"volume {volume_id} is a device of the node: make that larger")
        self._check_room(size, size - found.size)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.ftruncate(descriptor, size)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _as_error(error, f"volume {volume_id} can't be made larger") from None
        return VolumeDisk(volume_id, size)

    def get(self, volume_id: str) -> VolumeDisk:
        path = self.path(volume_id)
        try:
            size = _size(path)
        except FileNotFoundError:
            raise _no_volume(volume_id) from None
        except OSError as error:
            raise _as_error(error, f"volume {volume_id} can't be looked at ({path})") from None
        if size is None:
            raise _no_volume(volume_id)
        return VolumeDisk(volume_id, size)

    def all(self) -> list[VolumeDisk]:
        found = []
        for volume_id in self._ids():
            try:
                found.append(self.get(volume_id))
            except NotFound:
                continue  # deleted meanwhile, or no volume
        return found

    def free(self) -> int:
        """What is free and promised to no volume: all of them can be filled."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            free = os.statvfs(self._directory)
            promised = 0
            for volume_id in self._ids():
                found = os.lstat(self.path(volume_id))
                if stat.S_ISREG(found.st_mode):
                    promised += max(0, found.st_size - found.st_blocks * 512)
        except OSError as error:
            raise _as_error(error, f"{self._directory} can't be looked at") from None
        return min(MAX_SIZE, max(0, free.f_bavail * free.f_frsize - promised) // UNIT * UNIT)

    def _ids(self) -> Iterator[str]:
        try:
            names = sorted(os.listdir(self._directory))
        except FileNotFoundError:
            return
        for name in names:
            if name.endswith(_SUFFIX) and _ID.fullmatch(name.removesuffix(_SUFFIX)):
                yield name.removesuffix(_SUFFIX)

    def _check_room(self, size: int, more: int) -> None:
        if not 0 < size <= MAX_SIZE or size % UNIT:
            raise OutOfRange(f"{size} bytes: a volume has 1 MiB to {MAX_SIZE >> 40} TiB, in whole MiB")
        free = self.free()
        if more > free:
            raise ResourceExhausted(
                f"{self._directory} has {free >> 20} MiB that are promised to no volume, and {more >> 20} "
                "MiB are needed: delete volumes, or give volumes_dir a larger file system"
            )


def _size(path: Path) -> int | None:
    """The size of a file or block device; None: it is neither."""
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


def _as_error(error: OSError, what: str) -> ResourceExhausted | OutOfRange | Unavailable | FailedPrecondition:
    words = f"{what}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceExhausted(words)
    if error.errno == errno.EFBIG:
        return OutOfRange(words)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR):
        return FailedPrecondition(words)
    return Unavailable(words)
