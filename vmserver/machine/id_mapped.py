# SPDX-License-Identifier: Apache-2.0
"""Mounts that map the ids of files to those of a user namespace, and the files that keep such a namespace.

Through such a mount, a file of uid 0 belongs to the id outside that stands for 0; nothing is changed on the
disk. Every function blocks: call it in a thread. Source: the kernel's filesystems/idmappings.rst.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from infranetes_common.commands import ENVIRONMENT, find_program
from infranetes_common.errors import FailedPrecondition
from infranetes_common.user_namespaces import IdRange, UserNamespace
from vmserver.machine.mounts import Flag, mount, unmount

# The newer system calls have the same numbers on every architecture. Source: asm-generic/unistd.h.
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
# Source: linux/mount.h, linux/fcntl.h.
_CLONE, _FROM_DESCRIPTOR, _ID_MAPPED, _EMPTY_PATH, _HERE = 1, 4, 0x100000, 0x1000, -100

_SECONDS = 30.0  # for the program that makes a namespace to end

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _Attributes(ctypes.Structure):
    """struct mount_attr."""

    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("user_namespace", ctypes.c_uint64),
    )


def keep_namespace(users: UserNamespace, at: Path) -> None:
    """Make a user namespace, which stays for as long as it is mounted at the file `at`. Idempotent.

    :raise FailedPrecondition: the kernel refuses, or `unshare` is not installed."""
    if os.path.ismount(at):
        return
    # Not by `commands.thd_run`: it is talked to while it runs.
    # `cat` keeps the namespace until its input ends. Once it echoes a byte, the namespace exists.
    command = [find_program("unshare"), "--user", "cat"]
    with subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=ENVIRONMENT
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(b".")
            if child.stdout.read(1) != b".":
                raise OSError(errno.ENOSPC, "the kernel refuses another one")
            _write_map(child.pid, "uid", users.uids)
            _write_map(child.pid, "gid", users.gids)
            at.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            at.touch()
            mount(f"/proc/{child.pid}/ns/user", str(at), "", Flag.BIND)
        except OSError as error:
            raise FailedPrecondition(f"the pod's user namespace can't be made: {error.strerror}") from error
        finally:
            child.stdin.close()
            child.wait(_SECONDS)


def _write_map(pid: int, kind: str, ids: IdRange) -> None:
    with open(f"/proc/{pid}/{kind}_map", "w") as file:  # the kernel accepts a map only in one write
        file.write(f"0 {ids.first} {ids.length}\n")


@contextlib.contextmanager
def id_mapped(sources: Sequence[Path], namespace: Path, below: Path) -> Iterator[list[Path]]:
    """Mount directories once more, with the ids of a user namespace, while the context is open.

    Mounts made on top of them meanwhile keep working afterwards.

    :param below: a directory that is created for this, and removed afterwards.
    :raise FailedPrecondition: the kernel can't map the ids of such a file system."""
    places = [below / str(index) for index in range(len(sources))]
    try:
        for source, place in zip(sources, places, strict=True):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            unmount(place)  # an earlier mount, left by a killed agent
            _mount_mapped(source, place, namespace)
        yield places
    finally:
        for place in places:
            if place.is_dir():
                unmount(place)
                place.rmdir()
        with contextlib.suppress(FileNotFoundError):
            below.rmdir()


def _mount_mapped(source: Path, at: Path, namespace: Path) -> None:
    with contextlib.ExitStack() as opened:
        try:
            tree = _call(_OPEN_TREE, _HERE, os.fsencode(source), _CLONE | os.O_CLOEXEC)
            opened.callback(os.close, tree)
            users = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, users)
            wanted = _Attributes(set=_ID_MAPPED, user_namespace=users)
            size = ctypes.c_size_t(ctypes.sizeof(wanted))
            _call(_MOUNT_SETATTR, tree, b"", _EMPTY_PATH, ctypes.byref(wanted), size)
            _call(_MOVE_MOUNT, tree, b"", _HERE, os.fsencode(at), _FROM_DESCRIPTOR)
        except OSError as error:
            reason = error.strerror
            if error.errno in (errno.EINVAL, errno.ENOSYS):
                reason = "this VM's kernel can't; it needs Linux 5.19 or later"
            raise FailedPrecondition(f"{source} can't be mounted with the pod's ids: {reason}") from error


def _call(number: int, *arguments: object) -> int:
    found: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return found
