# SPDX-License-Identifier: Apache-2.0
"""Files as block devices. Source: linux/loop.h."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from infranetes_common.errors import FailedPrecondition, Unavailable

_CTL_GET_FREE, _CONFIGURE = 0x4C82, 0x4C0A
_READ_ONLY, _AUTOCLEAR = 1, 4
# loop_config: the descriptor and the block size; loop_info64, of which the flags alone are set; 64 bytes
_CONFIG = struct.Struct("=II 52x I 176x 64x")
_ATTEMPTS = 64  # at a device that is free, and then somebody else's


@contextlib.contextmanager
def loop_device(path: Path, dev: Path = Path("/dev")) -> Iterator[str]:
    """Make a file a read-only block device; yield its path. It ends with the block and its last mount.

    If this process is killed before the device is mounted, it ends as well. Blocks: use it in a thread.

    :raise Unavailable: there is no file. :raise FailedPrecondition: there is no device for it.
    """
    try:
        with contextlib.ExitStack() as opened:
            backing = _opened(opened, path, os.O_RDONLY)
            control = _opened(opened, dev / "loop-control", os.O_RDWR)
            device = _configured(opened, backing, control, dev)
            yield device
    except FileNotFoundError as error:
        if error.filename == str(path):
            raise Unavailable(f"{path} is not there") from None
        raise _none(path, error) from None
    except OSError as error:
        raise _none(path, error) from None


def _configured(opened: contextlib.ExitStack, backing: int, control: int, dev: Path) -> str:
    for attempt in range(_ATTEMPTS):
        device = dev / f"loop{fcntl.ioctl(control, _CTL_GET_FREE)}"
        descriptor = _opened(opened, device, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _CONFIGURE, _CONFIG.pack(backing, 0, _READ_ONLY | _AUTOCLEAR))
        except OSError as error:
            if error.errno != errno.EBUSY or attempt == _ATTEMPTS - 1:
                raise
        else:
            return str(device)
    raise AssertionError("not reached")


def _opened(opened: contextlib.ExitStack, path: Path, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    opened.callback(os.close, descriptor)
    return descriptor


def _none(path: Path, error: OSError) -> FailedPrecondition:
    return FailedPrecondition(f"{path} can't be made a block device: {error}; does the VM have `loop`?")
