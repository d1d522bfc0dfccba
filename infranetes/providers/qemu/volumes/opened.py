# SPDX-License-Identifier: Apache-2.0
"""A volume's file or block device, opened for a QEMU and locked for as long as that has it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

import attrs

from infranetes_common.errors import FailedPrecondition, InfranetesError, NotFound, ResourceExhausted

_SECTOR = 512


@attrs.frozen
class VolumeFile:
    """A volume's file, opened and locked. :ivar direct: whether it is used without the page cache."""

    descriptor: int
    direct: bool


def open_volume(volume: str, path: Path, read_only: bool) -> VolumeFile:
    """Open a volume's file and lock it. Blocks. :raise InfranetesError: it can't be had; nothing is open."""
    flags = (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC | os.O_NONBLOCK
    with contextlib.ExitStack() as opened:
        try:
            if stat.S_ISBLK(os.stat(path).st_mode):
                # Fails if the node itself uses it, and keeps the node from doing so while it is open.
                flags |= os.O_EXCL
            descriptor = os.open(path, flags)
            opened.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _refusal(volume, path, error) from None
        about = os.fstat(descriptor)
        if not about.st_nlink:  # it was deleted before it was locked
            raise NotFound(f"there is no volume {volume}: {path} is not on this node any more")
        regular = stat.S_ISREG(about.st_mode) and about.st_size and about.st_size % _SECTOR == 0
        if not regular and not stat.S_ISBLK(about.st_mode):
            raise FailedPrecondition(
                f"{path} can't be volume {volume}: it has to be a block device, or a file of whole sectors "
                f"of {_SECTOR} bytes, and is of {about.st_size} bytes with mode "
                f"{stat.filemode(about.st_mode)}"
            )
        opened.pop_all()
    return VolumeFile(descriptor, make_direct(descriptor))


def make_direct(descriptor: int) -> bool:
    """Make an open file bypass the page cache; return whether its file system can: some, such as an older
    tmpfs, can't.

    QEMU 9.1 and later refuse `cache.direct` for a file that was not opened so; earlier ones change it.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        return False
    return True


def _refusal(volume: str, path: Path, error: OSError) -> InfranetesError:
    if error.errno in (errno.EWOULDBLOCK, errno.EACCES) and error.filename is None:
        return FailedPrecondition(
            f"volume {volume} is attached to another VM, or is being changed: a volume is one pod's at a "
            "time. Wait until that pod is gone"
        )
    if error.errno == errno.EBUSY:
        return FailedPrecondition(
            f"{path} can't be attached as volume {volume}: another VM has it, or the node itself uses it, "
            "mounted or as a part of LVM, RAID or swap"
        )
    if error.errno == errno.EPERM and path.is_block_device():
        return FailedPrecondition(
            f"{path} can't be opened: {error.strerror}. The daemon's unit has to allow it "
            f"(PrivateDevices=no, DeviceAllow={path} rw)"
        )
    if error.errno == errno.ENOENT:
        return NotFound(f"there is no volume {volume}: {path} is not on this node")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ResourceExhausted(f"{path} can't be opened: {error.strerror}; raise LimitNOFILE")
    return FailedPrecondition(f"{path} can't be attached as volume {volume}: {error.strerror}")
