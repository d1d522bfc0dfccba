# SPDX-License-Identifier: Apache-2.0
"""The confinement of a child that reads a layer: it may use its three descriptors and compute.

It has no files besides these, and can't get any: no sockets, no other programs, no processes. A filter for
system calls does this (seccomp), since it needs no privileges: the daemon's unit has none for namespaces.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
from collections.abc import Iterable, Mapping

from infranetes.images.erofs.limits import MIB, Limits

THREADS = 3
_FIRST_USER = 1_900_010_000  # above the user ids of QEMU's VMs; the process id is added to it
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, _PR_SET_NO_NEW_PRIVS = 1, 22, 2, 38

# By machine: its AUDIT_ARCH, and the numbers of clone, of clone3 and of the allowed system calls.
_CALLS: Mapping[str, tuple[int, int, int, Mapping[str, int]]] = {
    "x86_64": (0xC000003E, 56, 435, {
        "read": 0, "write": 1, "close": 3, "fstat": 5, "lseek": 8, "mmap": 9, "mprotect": 10, "munmap": 11,
        "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "pwrite64": 18, "readv": 19,
        "writev": 20, "sched_yield": 24, "mremap": 25, "madvise": 28, "getpid": 39, "exit": 60,
        "sigaltstack": 131, "gettid": 186, "futex": 202, "sched_getaffinity": 204, "restart_syscall": 219,
        "clock_gettime": 228, "clock_nanosleep": 230, "exit_group": 231, "set_robust_list": 273,
        "getrandom": 318, "rseq": 334,
    }),
    "aarch64": (0xC00000B7, 220, 435, {
        "close": 57, "lseek": 62, "read": 63, "write": 64, "readv": 65, "writev": 66, "pwrite64": 68,
        "fstat": 80, "exit": 93, "exit_group": 94, "futex": 98, "set_robust_list": 99, "clock_gettime": 113,
        "clock_nanosleep": 115, "sched_getaffinity": 123, "sched_yield": 124, "restart_syscall": 128,
        "sigaltstack": 132, "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139, "getpid": 172,
        "gettid": 178, "brk": 214, "munmap": 215, "mremap": 216, "mmap": 222, "mprotect": 226, "madvise": 233,
        "getrandom": 278, "rseq": 293,
    }),
}  # fmt: skip
# Further calls, for who reads at a place, or makes a file of a known length.
PLACED = ("pread64", "ftruncate", "fsync")
_PLACED: Mapping[str, Mapping[str, int]] = {
    "x86_64": {"pread64": 17, "fsync": 74, "ftruncate": 77},
    "aarch64": {"ftruncate": 46, "pread64": 67, "fsync": 82},
}
# What a whole program is refused that is to read files and compute: all of networks, other processes, keys,
# namespaces and mounts, and ways around these: io_uring's queues, handles of files, programs in the kernel.
_OUTWARD: Mapping[str, tuple[int, ...]] = {
    "x86_64": (41, 42, 43, 44, 49, 50, 53, 101, 165, 166, 248, 249, 250, 272, 288, 298, 304, 308, 310, 311,
               321, 323, 425, 438),
    "aarch64": (39, 40, 97, 117, 198, 199, 200, 201, 202, 203, 206, 217, 218, 219, 241, 242, 265, 268, 270,
                271, 280, 282, 425, 438),
}  # fmt: skip
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_OTHER_ABI = 0x40000000  # x32's calls, which have numbers from here on
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data on little-endian machines
_CLONE_THREAD = 0x00010000


def enter(limits: Limits, parent: int = 0) -> None:
    """Give up all rights. Everything that is needed has to be imported before.

    :param parent: the process that this one must not outlive, if not whatever started it.
    :raise OSError: it has died already, or rights can't be given up.
    """
    image_bytes = limits.max_bytes + 2 * limits.held_bytes + 2 * 4096 * limits.entries + MIB
    bounds = {
        resource.RLIMIT_NOFILE: 3,
        resource.RLIMIT_FSIZE: image_bytes,
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_CPU: THREADS * int(limits.seconds) + 1,
        resource.RLIMIT_NPROC: THREADS,
    }
    confine(bounds, parent, _filter(platform.machine()))


def enter_placed(bounds: Mapping[int, int], parent: int) -> None:
    """Give up all rights as `enter` does, but for the calls of `PLACED`."""
    confine(bounds, parent, _filter(platform.machine(), PLACED))


def enter_for_program(bounds: Mapping[int, int], parent: int, writable: Iterable[int] = ()) -> None:
    """Give up all rights but to execute a program that reads files and computes.

    :param writable: descriptors of files that it may open again to write to them: they become its user's."""
    confine(bounds, parent, _refusing(platform.machine()), writable)


def confine(bounds: Mapping[int, int], parent: int, program: bytes, writable: Iterable[int] = ()) -> None:
    """Become a user of this process's own, if this is root, with limits and a filter of system calls.

    :param bounds: by the numbers of limits (RLIMIT_...). That of processes counts for another user alone.
    :param writable: descriptors of files that become that user's.
    """
    other_user = os.getuid() == 0
    if other_user:
        user = _FIRST_USER + os.getpid()
        for descriptor in writable:
            os.fchown(descriptor, user, user)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)  # takes all capabilities, too
    # This follows the change of user, which would undo it.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        raise ProcessLookupError(errno.ESRCH, "the parent has died")
    for what, value in {resource.RLIMIT_CORE: 0, **bounds}.items():
        if other_user or what != resource.RLIMIT_NPROC:  # the user is this process's own, so only it counts
            most = resource.getrlimit(what)[1]  # which nobody but root may raise
            bound = value if most == resource.RLIM_INFINITY else min(value, most)
            resource.setrlimit(what, (bound, bound))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that `write` fails instead
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if program:
        buffer = ctypes.create_string_buffer(program)
        count = len(program) // 8
        header = ctypes.create_string_buffer(struct.pack("@HP", count, ctypes.addressof(buffer)))
        _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header))


def _prctl(what: int, first: int, second: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(what, *map(ctypes.c_ulong, (first, second, 0, 0))) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _filter(machine: str, further: Iterable[str] = ()) -> bytes:
    """Return the filter as a program of classic BPF; empty for machines whose numbers are not known here.

    :param further: calls of `PLACED` that are allowed, too.
    """
    if machine not in _CALLS or struct.calcsize("P") != 8:  # a 32-bit Python has other numbers
        return b""
    arch, clone, clone3, allowed = _CALLS[machine]
    refuse = [(_RETURN, 0, 0, _REFUSE | errno.EPERM)]
    program = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    for number in (*allowed.values(), *(_PLACED[machine][name] for name in further)):
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    # A filter can't see the arguments of clone3. If that does not exist, the C library uses clone.
    program += [(_EQUAL, 0, 1, clone3), (_RETURN, 0, 0, _REFUSE | errno.ENOSYS)]
    program += [(_EQUAL, 0, 3, clone), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_ANY_BIT, 0, 1, _CLONE_THREAD)]
    program += [(_RETURN, 0, 0, _ALLOW), *refuse]
    return b"".join(struct.pack("<HBBI", *step) for step in program)


def _refusing(machine: str) -> bytes:
    """Return a filter by which calls fail that get a program out of its files; empty as `_filter`."""
    if machine not in _CALLS or struct.calcsize("P") != 8:
        return b""
    refuse = (_RETURN, 0, 0, _REFUSE | errno.EPERM)
    program = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, _CALLS[machine][0]), (_RETURN, 0, 0, _KILL)]
    program += [(_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _OTHER_ABI), refuse]
    for number in _OUTWARD[machine]:
        program += [(_EQUAL, 0, 1, number), refuse]
    program += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("<HBBI", *step) for step in program)
