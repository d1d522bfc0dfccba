# SPDX-License-Identifier: Apache-2.0
"""The first process of a test worker: ``isolation.py [--isolated] COMMAND...``, its standard input a socket.

It runs the command, which shares that socket, and ends with it. When the other side of the socket is closed,
so also when the test run is killed, it kills the command and every process that came of it. So no run leaves
processes behind, and nobody needs the right to signal a worker that sudo has started.

With ``--isolated``, in namespaces that ``unshare`` has made, it first makes a machine of its own of them: a
loopback interface that is up, the sysfs of that network, and no named network namespaces. What tests do to
interfaces, addresses, packet filters, mounts and processes is then seen by no other worker, and a test that
fetches something from a network fails.

It uses only the standard library, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

#: Precedes a command that runs in a network, mounts and process ids of its own, and dies with this process.
UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--")
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1  # netdevice(7)
MS_BIND, MS_MOVE, MNT_DETACH = 4096, 8192, 2  # mount(2), umount2(2)
NAMED_NAMESPACES = "/run/netns"  # ip-netns(8)


def possible(become_root: Sequence[str] = ()) -> bool:
    """Return whether this process may isolate workers. :param become_root: precedes what is run as root."""
    command = [*become_root, *UNSHARE, "true"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0
    return False


def first_process(isolated: bool, command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` below this module's process."""
    own = [sys.executable, "-I", __file__, *(["--isolated"] if isolated else []), *command]
    return [*UNSHARE, *own] if isolated else own


# ---- the program


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))


def mount(source: str, target: str, kind: str = "none", flags: int = 0, data: str = "") -> None:
    """Mount, as mount(2) says."""
    words = [each.encode() for each in (source, target, kind)]
    if _libc().mount(*words, ctypes.c_ulong(flags), data.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"{kind} can't be mounted", target)


def _unmount(target: str) -> None:
    if _libc().umount2(target.encode(), MNT_DETACH) != 0:
        raise OSError(ctypes.get_errno(), "it can't be unmounted", target)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _mounts_below(directory: str) -> list[str]:
    """Return the mount points below a directory, outer ones first (proc(5), mountinfo)."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in points if point.startswith(f"{directory}/")]


def _renew_sysfs() -> None:
    """Mount a sysfs that shows this network's interfaces, with all that is mounted in the one before.

    It takes that one's place rather than cover it, so that nothing is listed twice among the mounts.
    """
    new = tempfile.mkdtemp(prefix="infranetes-sysfs-")
    try:
        mount("sysfs", new, "sysfs")
        for point in _mounts_below("/sys"):
            if Path(point).is_dir():
                mount(point, new + point.removeprefix("/sys"), flags=MS_BIND)
        _unmount("/sys")
        mount(new, "/sys", flags=MS_MOVE)
    finally:
        os.rmdir(new)


def isolate() -> None:
    """Make a machine of its own of new namespaces of network and mounts."""
    _raise_loopback()
    _renew_sysfs()
    Path(NAMED_NAMESPACES).mkdir(parents=True, exist_ok=True)
    mount("tmpfs", NAMED_NAMESPACES, "tmpfs", data="mode=0755")


def _children() -> Iterator[int]:
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            yield from map(int, (task / "children").read_text().split())


def _kill_all() -> None:
    """Kill every process that came of this one. Orphans become its children, as it is their subreaper."""
    while children := list(_children()):
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _supervise(command: Sequence[str]) -> int:
    """Run a command until it ends or the socket's other side is closed; return its exit code."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        # A terminal's Ctrl-C is the run's, which says what is to end. Commands would inherit SIG_IGN.
        signal.signal(number, lambda *_: None)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    child = subprocess.Popen(command, restore_signals=True)
    events = select.poll()
    events.register(0, select.POLLRDHUP)
    events.register(woken, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _event in events.poll()}
        if 0 in ready:
            return 128 + signal.SIGHUP
        os.read(woken, 4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child.pid:
                    code = os.waitstatus_to_exitcode(ended[1])
                    return code if code >= 0 else 128 - code


def main(arguments: list[str]) -> int:
    """Run the command that the arguments name."""
    isolated = arguments[0] == "--isolated"
    if isolated:
        isolate()
    try:
        return _supervise(arguments[isolated:])
    finally:
        _kill_all()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
