# SPDX-License-Identifier: Apache-2.0
"""A tmpfs that is filled before anybody sees it, by the calls of Linux 5.2: fsopen(2) and what goes with it.
A file of it, or any other, can be bound by its descriptor.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import ctypes
import errno
import os
from types import TracebackType

# System call numbers of every architecture. glibc has functions for them from 2.36 on. Source: linux/mount.h
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT = 428, 429, 430, 431, 432
_CLOEXEC = 1
_CLONE, _EMPTY_PATH = 1, 0x1000
_SET_STRING, _CREATE = 1, 6
_NO_SETID, _NO_DEVICES, _NO_EXEC = 2, 4, 8
_FROM_EMPTY_PATH, _TO_EMPTY_PATH = 0x04, 0x40
_UMOUNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)


class Tmpfs:
    """A tmpfs of root alone, with nosuid, nodev and noexec. It is gone with the context that makes it, unless
    it was mounted.

    :param source: its source in the mount table. :param size: of all files, in bytes, rounded up to a page.
    :raise OSError: EPERM: the process may not mount."""

    def __init__(self, source: bytes, size: int) -> None:
        if b"\0" in source:
            raise OSError(errno.EINVAL, "a NUL byte in a mount's source")
        context = _call(_FSOPEN, b"tmpfs", _CLOEXEC)
        try:
            for key, value in ((b"source", source), (b"size", b"%d" % size), (b"mode", b"0700")):
                _call(_FSCONFIG, context, _SET_STRING, key, value, 0)
            _call(_FSCONFIG, context, _CREATE, None, None, 0)
            self._descriptor = _call(_FSMOUNT, context, _CLOEXEC, _NO_SETID | _NO_DEVICES | _NO_EXEC)
        finally:
            os.close(context)

    def __enter__(self) -> Tmpfs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)

    def write(self, name: str, content: bytes) -> None:
        """Make a file in it that root alone may read."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, 0o600, dir_fd=self._descriptor), "wb") as file:
            file.write(content)

    def open(self, name: str) -> int:
        """Open a file in it for reading."""
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._descriptor)

    def mount(self, directory: int) -> None:
        """Mount it on a directory, by its descriptor."""
        _call(_MOVE_MOUNT, self._descriptor, b"", directory, b"", _FROM_EMPTY_PATH | _TO_EMPTY_PATH)


def bind(source: int, target: int) -> None:
    """Have a file appear at the place of another one too, both by their descriptors."""
    made = _call(_OPEN_TREE, source, b"", _CLONE | os.O_CLOEXEC | _EMPTY_PATH)
    try:
        _call(_MOVE_MOUNT, made, b"", target, b"", _FROM_EMPTY_PATH | _TO_EMPTY_PATH)
    finally:
        os.close(made)


def unmount(path: bytes) -> None:
    """Unmount what is mounted at a path: at once if it is not used, or else once it no longer is.

    :raise OSError: it can't be unmounted, or nothing is mounted there."""
    for flags in (_UMOUNT_NOFOLLOW, _UMOUNT_NOFOLLOW | _UMOUNT_DETACH):
        if _libc.umount2(path, flags) >= 0:
            return
        number = ctypes.get_errno()
        if number != errno.EBUSY:
            break
    raise OSError(number, os.strerror(number))


def _call(number: int, *arguments: int | bytes | None) -> int:
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
