# SPDX-License-Identifier: Apache-2.0
"""The agent's own mount namespace, where the guest has made one for it.

systemd reads the whole table of mounts again at each mount that it sees, which under emulation takes longer
than the mount. What conmon and crun run needs no other service, so their guest makes a namespace whose mounts
are private, and keeps it: each start of the agent joins the same one.

Docker, and what systemd runs, see the agent's mounts once `thd_share` has made the mounts that lie below them
peers of the machine's own. Mounts made before that stay the agent's own.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from infranetes_common.errors import FailedPrecondition
from vmserver.machine.mounts import mounts

MACHINE = Path("/proc/1/root")
PARENTS = ("/", "/run")  # the mounts that the agent mounts something below
_NEW_MOUNTS = 0x20000  # linux/sched.h: CLONE_NEWNS
_MOVE_MOUNT = 429  # the system call's number, on every architecture
_SYMLINKS, _SET_GROUP = 0x1, 0x100  # linux/mount.h: MOVE_MOUNT_F_SYMLINKS, MOVE_MOUNT_SET_GROUP
_HERE = -100  # AT_FDCWD

_libc = ctypes.CDLL(None, use_errno=True)


def join(kept: str) -> None:
    """Enter the namespace that is kept at a path. Call it while this process has no other thread.

    :raise FailedPrecondition: it is not there, or the kernel refuses."""
    try:
        descriptor = os.open(kept, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise FailedPrecondition(f"mount_namespace {kept}: {error.strerror}") from None
    try:
        if _libc.setns(descriptor, _NEW_MOUNTS) < 0:
            raise FailedPrecondition(f"mount_namespace {kept}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(descriptor)


def thd_share(machine: Path = MACHINE) -> None:
    """Make what the agent mounts from now on visible to the machine's services, and the other way round.

    Idempotent. Blocks.

    :raise FailedPrecondition: the kernel refuses; it can from Linux 5.15 on."""
    private = {one.point for one in mounts() if not one.shared}
    for point in PARENTS:
        if point in private:
            _make_peer(f"{machine}{point}/.", point)


def _make_peer(other: str, point: str) -> None:
    """Make a private mount a peer of another one of the same file system."""
    words = (_HERE, os.fsencode(other), _HERE, os.fsencode(point), _SET_GROUP | _SYMLINKS)
    if _libc.syscall(_MOVE_MOUNT, *words) < 0:
        raise FailedPrecondition(
            f"the agent's mounts below {point} can't be shown to the machine's services: "
            f"{os.strerror(ctypes.get_errno())}"
        )
