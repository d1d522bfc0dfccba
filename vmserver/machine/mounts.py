# SPDX-License-Identifier: Apache-2.0
"""Mounting by system call: in an emulated VM each start of the `mount` program costs 0.1 s and more.

Every function blocks: call it in a thread.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import TypeVar

import attrs

from infranetes_common.errors import FailedPrecondition, InfranetesError, ResourceExhausted, Unavailable

T = TypeVar("T")

MAX_OPTIONS = 4095  # bytes of a mount's options: mount(2) takes one page

_UMOUNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_CLONE_FS = 0x200
_ESCAPED = re.compile(r"\\([0-7]{3})")  # the kernel's escapes of space, tab, newline and backslash

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
)
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_libc.syncfs.argtypes = (ctypes.c_int,)
_libc.unshare.argtypes = (ctypes.c_int,)


class Flag(enum.IntFlag):
    """Flags of mount(2). Source: linux/mount.h."""

    READ_ONLY = 1
    NO_SETID = 2
    NO_DEVICES = 4
    NO_EXEC = 8
    REMOUNT = 32
    BIND = 4096


NO_FLAGS = Flag(0)


@attrs.frozen
class Mount:
    """A line of /proc/self/mountinfo.

    :ivar device: MAJOR:MINOR of what is mounted.
    :ivar shared: whether what is mounted below it is mounted in its peers, too.
    :ivar id: its number, by which /proc names it elsewhere.
    """

    point: str
    device: str
    kind: str
    options: frozenset[str]
    shared: bool = False
    id: int = 0


def mount(source: str, at: str, kind: str, flags: Flag = NO_FLAGS, options: str = "") -> None:
    """Mount a file system. Paths may be relative to the calling thread's directory.

    :raise FailedPrecondition: there is none of that kind on `source`, or the kernel does not know the kind.
    :raise ResourceExhausted: no memory. :raise Unavailable: `source` is not there, or can't be read.
    """
    try:
        system_mount(source, at, kind, flags, options)
    except OSError as error:
        raise _as_error(error, f"{source} can't be mounted at {at} as {kind or 'it is'}", kind) from None


def unmount(at: str | Path) -> None:
    """Unmount the file system at a path: at once if it is unused, or else as soon as it is.

    Does nothing if nothing is mounted there.

    :raise Unavailable: it can't be unmounted.
    """
    try:
        try:
            _unmount(str(at), _UMOUNT_NOFOLLOW)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            _unmount(str(at), _UMOUNT_NOFOLLOW | _UMOUNT_DETACH)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOENT):
            raise Unavailable(f"{at} can't be unmounted: {error.strerror}") from None


def sync(at: str | Path) -> None:
    """Write all that is pending in the file system of a directory.

    :raise Unavailable: it can't be written."""
    descriptor = os.open(at, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(descriptor) < 0:
            words = os.strerror(ctypes.get_errno())
            raise Unavailable(f"what was written to {at} can't be synced to the disk: {words}")
    finally:
        os.close(descriptor)


def unmount_unused(at: str | Path) -> bool:
    """Unmount the file system at a path; return False if it is in use.

    Does nothing if nothing is mounted there.

    :raise Unavailable: it can't be unmounted for another reason.
    """
    try:
        _unmount(str(at), _UMOUNT_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        if error.errno not in (errno.EINVAL, errno.ENOENT):
            raise Unavailable(f"{at} can't be unmounted: {error.strerror}") from None
    return True


def mounts(table: Path = Path("/proc/self/mountinfo")) -> list[Mount]:
    """List what is mounted, outer mounts first. Source: proc_pid_mountinfo(5)."""
    found = []
    # Of all characters that end a line elsewhere, the kernel escapes only newlines.
    for line in os.fsdecode(table.read_bytes()).split("\n")[:-1]:
        before, _, after = line.partition(" - ")
        id, _, device, _, point, options, *optional = before.split(" ")
        shared = any(each.startswith("shared:") for each in optional)
        kind = after.split(" ")[0]
        found.append(Mount(_unescaped(point), device, kind, frozenset(options.split(",")), shared, int(id)))
    return found


def mounts_below(top: str | Path) -> list[Mount]:
    """List what is mounted inside of a directory, outer mounts first."""
    return [one for one in mounts() if one.point.startswith(f"{top}/")]


def in_directory(directory: Path, work: Callable[[], T]) -> T:
    """Call `work()` with this working directory; return its result or raise its error.

    Only a thread made for the call changes directory, so this process keeps its own.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            if _libc.unshare(_CLONE_FS) < 0:
                raise InfranetesError(f"unshare(CLONE_FS): {os.strerror(ctypes.get_errno())}")
            os.chdir(directory)
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=run, name="in-directory")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def system_mount(source: str, at: str, kind: str, flags: Flag, options: str) -> None:
    """Call mount(2), for callers with error messages of their own. :raise OSError: it fails."""
    if len(os.fsencode(options)) > MAX_OPTIONS:
        raise OSError(errno.E2BIG, f"options of over {MAX_OPTIONS} bytes")
    words = [os.fsencode(word) for word in (source, at, kind)]
    if any(b"\0" in word for word in words):
        raise OSError(errno.EINVAL, "a NUL byte in a path")
    if _libc.mount(*words, int(flags), os.fsencode(options)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _unmount(at: str, flags: int) -> None:
    if _libc.umount2(os.fsencode(at), flags) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _as_error(error: OSError, what: str, kind: str) -> InfranetesError:
    if error.errno in (errno.EINVAL, errno.EUCLEAN, errno.ENOTBLK):
        return FailedPrecondition(f"{what}: it holds something else ({error.strerror})")
    if error.errno == errno.ENODEV:
        return FailedPrecondition(f"{what}: this VM's kernel has no {kind}; load its module into the image")
    if error.errno in (errno.ENOMEM, errno.ENOSPC):
        return ResourceExhausted(f"{what}: {error.strerror}")
    if error.errno in (errno.ENOENT, errno.ENXIO, errno.EIO):
        return Unavailable(f"{what}: {error.strerror}")
    return FailedPrecondition(f"{what}: {error.strerror}")


def _unescaped(field: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), field)
