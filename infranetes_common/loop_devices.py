# SPDX-License-Identifier: Apache-2.0
"""Files as read-only block devices of the kernel. Source: linux/loop.h.

Every function blocks: call it in a thread. All raise OSError, as the kernel's calls do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import attrs

MAJOR = 7  # the major number of loop devices
_CTL_GET_FREE, _CONFIGURE, _CLEAR, _SET_STATUS, _GET_STATUS = 0x4C82, 0x4C0A, 0x4C01, 0x4C04, 0x4C05
_READ_ONLY, _AUTOCLEAR = 1, 4
# loop_config: the descriptor, the block size, a loop_info64 of which only the flags are set, and 64 bytes.
_CONFIG = struct.Struct("=II 52x I 176x 64x")
_INFO = struct.Struct("=52x I 176x")  # loop_info64
_ATTEMPTS = 64  # to configure a free device: another process may take it first
_BACKING_FILE = "loop/backing_file"


@attrs.frozen
class LoopDevice:
    """A loop device that is open.

    :ivar path: of its file. :ivar descriptor: it is closed with the context that has opened it."""

    path: str
    descriptor: int

    def read(self, most: int) -> bytes:
        """Return the device's first `most` bytes."""
        return os.pread(self.descriptor, most, 0)

    def backing_file(self, sys: Path = Path("/sys")) -> str:
        """Return the path of the file behind it, as the kernel knows it; "": no file is behind it."""
        number = os.fstat(self.descriptor).st_rdev
        return _read(sys / f"dev/block/{os.major(number)}:{os.minor(number)}" / _BACKING_FILE)

    def keep(self) -> None:
        """Keep the device after its last user has closed it, until `end`. Idempotent."""
        info = bytearray(_INFO.size)
        fcntl.ioctl(self.descriptor, _GET_STATUS, info)
        (flags,) = _INFO.unpack(info)
        struct.pack_into("=I", info, 52, flags & ~_AUTOCLEAR)
        fcntl.ioctl(self.descriptor, _SET_STATUS, bytes(info))

    def end(self) -> None:
        """Detach the device once its last user has closed it. Idempotent."""
        try:
            fcntl.ioctl(self.descriptor, _CLEAR)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise


@contextlib.contextmanager
def new_loop_device(backing: int, dev: Path = Path("/dev")) -> Iterator[LoopDevice]:
    """Attach an open file as a block device. Unless it is kept, it ends with its last user: with the context,
    or when a file system mounted from it is unmounted, and also if this process is killed."""
    with contextlib.ExitStack() as opened:
        control = _opened(opened, dev / "loop-control", os.O_RDWR)
        for attempt in range(_ATTEMPTS):
            path = dev / f"loop{fcntl.ioctl(control, _CTL_GET_FREE)}"
            try:
                descriptor = _opened(opened, path, os.O_RDONLY)
                fcntl.ioctl(descriptor, _CONFIGURE, _CONFIG.pack(backing, 0, _READ_ONLY | _AUTOCLEAR))
            except OSError as error:
                if error.errno not in (errno.EBUSY, errno.ENXIO) or attempt == _ATTEMPTS - 1:
                    raise
            else:
                break
        yield LoopDevice(str(path), descriptor)


@contextlib.contextmanager
def open_loop_device(path: str) -> Iterator[LoopDevice]:
    """Open a loop device, which need not have a file.

    :raise FileNotFoundError: there is none, or it is just ending."""
    with contextlib.ExitStack() as opened:
        try:
            descriptor = _opened(opened, Path(path), os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            raise FileNotFoundError(errno.ENOENT, "it is just ending", path) from None
        yield LoopDevice(path, descriptor)


def loop_devices_of(backing_file: str, sys: Path = Path("/sys"), dev: Path = Path("/dev")) -> list[str]:
    """Return the paths of the loop devices with a file of this path; see `LoopDevice.backing_file`."""
    attributes = sorted((sys / "block").glob(f"loop*/{_BACKING_FILE}"))
    return [str(dev / each.parent.parent.name) for each in attributes if _read(each) == backing_file]


def is_loop_device(about: os.stat_result) -> bool:
    """Return whether this `stat` result is that of a loop device."""
    return stat.S_ISBLK(about.st_mode) and os.major(about.st_rdev) == MAJOR


def _read(attribute: Path) -> str:
    """Return what the kernel has in a device's attribute; "": the device has no file, or has just ended."""
    try:
        return attribute.read_text(errors="replace").removesuffix("\n")
    except OSError as error:
        # ENODEV: the attribute was removed after it was opened and before it was read.
        if error.errno not in (errno.ENOENT, errno.ENODEV):
            raise
        return ""


def _opened(opened: contextlib.ExitStack, path: Path, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    opened.callback(os.close, descriptor)
    return descriptor
