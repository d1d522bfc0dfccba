# SPDX-License-Identifier: Apache-2.0
"""Files as block devices, with errors that say what to do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from infranetes_common.errors import FailedPrecondition, Unavailable
from infranetes_common.loop_devices import new_loop_device


@contextlib.contextmanager
def loop_device(path: Path, dev: Path = Path("/dev")) -> Iterator[str]:
    """Make a file a read-only block device; yield its path. It ends with the block and its last mount.

    If this process is killed before the device is mounted, it ends as well. Blocks: use it in a thread.

    :raise Unavailable: there is no file. :raise FailedPrecondition: there is no device for it.
    """
    try:
        backing = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with new_loop_device(backing, dev) as device:
                yield device.path
        finally:
            os.close(backing)
    except FileNotFoundError as error:
        if error.filename == str(path):
            raise Unavailable(f"{path} is not there") from None
        raise _none(path, error) from None
    except OSError as error:
        raise _none(path, error) from None


def _none(path: Path, error: OSError) -> FailedPrecondition:
    return FailedPrecondition(f"{path} can't be made a block device: {error}; does the VM have `loop`?")
