# SPDX-License-Identifier: Apache-2.0
"""``python pivot.py ROOT COMMAND...``: run a command with a mount point as the root of this mount namespace.

Unlike in a chroot, the kernel lets it make user namespaces, and mounts are shared, as they are under systemd.
"""

from __future__ import annotations

import ctypes
import os
import sys

_PIVOT_ROOT = 155  # the number of pivot_root(2) on x86-64
_REC, _SHARED, _DETACH = 1 << 14, 1 << 20, 2


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def main(root: str, *command: str) -> None:
    """Change the root, and replace this process by the command."""
    libc = ctypes.CDLL(None, use_errno=True)
    os.chdir(root)
    _check(libc.syscall(_PIVOT_ROOT, b".", b"."))  # the old root is on top of the new one now
    _check(libc.umount2(b".", _DETACH))
    os.chdir("/")
    _check(libc.mount(b"none", b"/", None, _REC | _SHARED, None))
    # It replaces this process, so that it dies with its parent; env looks up the command in the new root.
    os.execv("/usr/bin/env", ["env", *command])  # noqa: S606


if __name__ == "__main__":
    main(*sys.argv[1:])
