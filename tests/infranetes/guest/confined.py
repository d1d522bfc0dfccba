# SPDX-License-Identifier: Apache-2.0
"""Tries, in the sandbox of infranetes-guest.service, what mmdebstrap and packages' scripts do and what they
are not to do; writes what it could not. Argument: a directory of the test's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import stat
import sys
from pathlib import Path

from tests.infranetes.daemon.confined import call, errors, run

_APT = 42  # Debian's user _apt has such a number
_AUDIT = 9  # NETLINK_AUDIT
# mmdebstrap makes these in a tree: see @devfiles in it.
_DEVICES = ((5, 1), (1, 7), (1, 3), (5, 2), (1, 8), (5, 0), (1, 9), (1, 5))
# A file's capabilities (VFS_CAP_REVISION_2): cap_net_raw, as that of ping.
_CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
_CLONE_NEWUSER = 0x10000000
_SYS_BPF, _SYS_INIT_MODULE = 321, 175  # of amd64
_SYSLOG_READ_ALL = 3
_PTRACE_TRACEME = 0


class Needed:
    """What is done to make a tree, in the order in which it is done."""

    def device_nodes(self) -> None:
        os.mkdir("tree")
        for number, (major, minor) in enumerate(_DEVICES):
            os.mknod(f"tree/{number}", stat.S_IFCHR | 0o666, os.makedev(major, minor))

    def mounts(self) -> None:
        run("unshare", "--mount", "--propagation", "unchanged", "--", "true")
        for directory in ("proc", "sys", "pts", "usr"):
            os.mkdir(f"tree/{directory}")
        run("mount", "-t", "proc", "-o", "ro", "proc", "tree/proc")
        run("mount", "-t", "sysfs", "-o", "ro,nosuid,nodev,noexec", "sys", "tree/sys")
        run("mount", "-t", "devpts", "none", "tree/pts", "-o", "noexec,nosuid,uid=5,mode=620,ptmxmode=666")
        run("mount", "-o", "bind", "/usr", "tree/usr")

    def changing_root(self) -> None:
        for link in ("bin", "lib", "lib64"):
            os.symlink(f"usr/{link}", f"tree/{link}")
        if "PRETTY_NAME" not in run("chroot", "tree", "cat", "/usr/lib/os-release"):
            raise OSError("that root was not seen")

    def knowing_that_the_root_is_another(self) -> None:
        run("chroot", "tree", "ischroot")

    def unmounting(self) -> None:
        for directory in ("usr", "pts", "sys", "proc"):
            run("umount", f"tree/{directory}")

    def owners_and_set_id_bits(self) -> None:
        Path("program").touch()
        os.chown("program", _APT, _APT)
        os.chmod("program", 0o6755)  # noqa: S103 - as some packages' programs are
        if stat.S_IMODE(os.stat("program").st_mode) != 0o6755:
            raise OSError("a set-id bit was lost")
        with open("program", "a"):
            pass

    def capabilities_of_files(self) -> None:
        os.setxattr("program", "security.capability", _CAPABILITY)

    def apts_own_user(self) -> None:
        drop = ("setpriv", f"--reuid={_APT}", f"--regid={_APT}", "--clear-groups", "--no-new-privs", "--")
        run("sh", "-c", f"{' '.join(drop)} sleep 60 & kill -0 $! && sleep 0.2 && kill $!")

    def downloads(self) -> None:
        for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
            socket.socket(family, socket.SOCK_STREAM).close()

    def the_record_of_new_users(self) -> None:
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _AUDIT).close()

    def terminals(self) -> None:
        for descriptor in os.openpty():
            os.close(descriptor)

    def temporary_files(self) -> None:
        for directory in ("/tmp", "/var/tmp"):
            Path(directory, "made").write_text("here")


class Refused:
    """What no build does."""

    def disks(self) -> None:
        os.mknod("disk", stat.S_IFBLK | 0o600, os.makedev(7, 0))

    def memory(self) -> None:
        os.mknod("memory", stat.S_IFCHR | 0o600, os.makedev(1, 1))

    def the_console(self) -> None:
        os.close(os.open("tree/0", os.O_WRONLY))

    def modules(self) -> None:
        call("syscall", _SYS_INIT_MODULE, b"", 0, b"")

    def programs_in_the_kernel(self) -> None:
        call("syscall", _SYS_BPF, 0, None, 0)

    def the_kernels_log(self) -> None:
        call("klogctl", _SYSLOG_READ_ALL, ctypes.create_string_buffer(100), 100)

    def the_clock(self) -> None:
        call("adjtimex", ctypes.create_string_buffer(1024))

    def the_hosts_name(self) -> None:
        call("sethostname", b"other", 5)

    def settings(self) -> None:
        os.close(os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY))

    def tracing(self) -> None:
        call("ptrace", _PTRACE_TRACEME, 0, None, None)

    def reading_process_1(self) -> None:
        os.close(os.open("/proc/1/mem", os.O_RDONLY))

    def namespaces_of_users(self) -> None:
        call("unshare", _CLONE_NEWUSER)

    def packet_sockets(self) -> None:
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()

    def real_time(self) -> None:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))

    def programs_of_the_node(self) -> None:
        os.close(os.open("/usr/bin/infranetes-probe", os.O_CREAT | os.O_WRONLY))

    def homes(self) -> None:
        os.close(os.open("/root/infranetes-probe", os.O_CREAT | os.O_WRONLY))


def main(directory: str) -> None:
    """Try all."""
    signal.alarm(60)
    os.chdir(directory)
    for name, error in errors(Needed(), ()):
        if error:
            print(f"{name}: {error}")
    for name, error in errors(Refused(), ()):
        if not error:
            print(f"{name}: it could")
    print("done")


if __name__ == "__main__":
    main(sys.argv[1])
