# SPDX-License-Identifier: Apache-2.0
"""Try, in the unit's sandbox, what the daemon needs and what it must not do; print what went wrong.

Arguments: a directory of the test's, with a file and a directory of another user; the pid of a process of
that user; and optionally the names of the only things to try.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

# Like the user of a VM's QEMU; tests/infranetes/daemon/test_confinement.py uses it too.
OTHER = 1900000042
_PTRACE_ATTACH = 16
_CLONE_NEWNET = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library. :raise OSError: it failed."""
    if getattr(_libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def run(*command: str, text: str = "") -> str:
    """Run a command and return what it writes. :raise OSError: it failed."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise OSError(done.stderr.strip())
    return done.stdout


class Needed:
    """What the daemon does, by the capability or the part of the sandbox that allows it."""

    def __init__(self, victim: int) -> None:
        self.victim = victim

    def cap_net_admin(self) -> None:
        name = f"inft{os.getpid()}"
        run("ip", "tuntap", "add", "mode", "tap", "name", name)
        run("ip", "link", "delete", name)

    def cap_setuid(self) -> None:
        run("setpriv", f"--reuid={OTHER}", "--keep-groups", "--", "true")

    def cap_setgid(self) -> None:
        run("setpriv", f"--regid={OTHER}", "--clear-groups", "--", "true")

    def cap_setpcap(self) -> None:
        said = run("setpriv", "--bounding-set=-all", "--", "cat", "/proc/self/status")
        if "\nCapBnd:\t0000000000000000\n" not in said:
            raise OSError("capabilities are left")

    def cap_chown(self) -> None:
        Path("given").touch()
        os.chown("given", OTHER, OTHER)

    def cap_dac_override(self) -> None:
        with open("others", "r+"):
            pass

    def cap_fowner(self) -> None:
        os.chmod("others", 0o640)

    def cap_fsetid(self) -> None:
        os.chmod("shared", 0o2775)  # noqa: S103 - the mode that kubelet sets
        if not os.stat("shared").st_mode & stat.S_ISGID:
            raise OSError("the set-group-ID bit was lost")

    def cap_kill(self) -> None:
        os.kill(self.victim, 0)

    def qemu(self) -> None:
        from infranetes.providers.qemu.host.privileges import QemuUser, unprivileged
        from infranetes.providers.qemu.program.command_line import SANDBOX

        qemu = ["qemu-system-x86_64", "-machine", "none", "-display", "none", "-monitor", "stdio"]
        user = QemuUser(OTHER, OTHER)
        run(*unprivileged([*qemu, "-sandbox", SANDBOX], user, dies_with_parent=True), text="quit\n")

    def settings_of_the_network(self) -> None:
        with open("/proc/sys/net/ipv4/ip_forward", "r+") as setting:
            setting.write(setting.read())

    def tun(self) -> None:
        os.close(os.open("/dev/net/tun", os.O_RDWR))

    def credentials_in_roots_home(self) -> None:
        os.listdir("/root")

    def processes_of_other_users(self) -> None:
        os.stat(f"/proc/{self.victim}")


class Refused:
    """What neither the daemon nor its children may do."""

    def __init__(self, victim: int) -> None:
        self.victim = victim

    def mounting(self) -> None:
        call("mount", b"tmpfs", b"/media", b"tmpfs", 0, None)

    def tracing(self) -> None:
        call("ptrace", _PTRACE_ATTACH, self.victim, None, None)

    def namespaces(self) -> None:
        call("unshare", _CLONE_NEWNET)

    def packet_sockets(self) -> None:
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()

    def changing_programs(self) -> None:
        os.close(os.open("/usr/bin/infranetes-probe", os.O_CREAT | os.O_WRONLY))

    def other_settings(self) -> None:
        os.close(os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY))

    def making_devices(self) -> None:
        os.mknod("device", stat.S_IFBLK | 0o600, os.makedev(7, 0))

    def other_devices(self) -> None:
        if {"loop-control", "mem", "vda", "sda"}.isdisjoint(os.listdir("/dev")):
            raise OSError("they are not there")

    def homes(self) -> None:
        if os.path.ismount("/home"):
            raise OSError("they are hidden")

    def seeing_processes_as_a_vm(self) -> None:
        run("setpriv", f"--reuid={OTHER + 1}", f"--regid={OTHER + 1}", "--clear-groups", "--",
             "ls", f"/proc/{self.victim}")  # fmt: skip


def errors(tries: object, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each public method of `tries` and its error, or "" if it worked."""
    for name in names or [each for each in vars(type(tries)) if not each.startswith("_")]:
        try:
            getattr(tries, name)()
        except OSError as error:
            yield name, str(error) or repr(error)
        else:
            yield name, ""


def main(directory: str, victim: int, names: Sequence[str]) -> None:
    """Try everything, or, given `names`, only those things that the daemon does."""
    os.chdir(directory)
    for name, error in errors(Needed(victim), names):
        if error:
            print(f"{name}: {error}")
    for name, error in () if names else errors(Refused(victim), ()):
        if not error:
            print(f"{name}: it could")
    print("done")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
