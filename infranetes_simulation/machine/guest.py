# SPDX-License-Identifier: Apache-2.0
"""The first process of a VM: its file systems, its network, its agent. Ends when its input ends.

    python -m infranetes_simulation.machine.guest DIRECTORY

It reads lines: first the `Hardware` as JSON, then a line each time the agent's behaviour is to change. It
writes ``up`` once it may be moved to its cgroup, and ``running`` once it has its network.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from infranetes_simulation.machine import AGENT_PORT, cgroups, network

DISK = Path("/run/machine")  # where the VM finds its own directory
AGENT, NO_AGENT, SILENT = "agent", "no-agent", "silent"
"""The agent's behaviours: it runs; nothing listens; connections are accepted and get no answer."""

_RESTART_SECONDS = 0.2  # as in debian/vmserver.service
_LOOK_SECONDS = 0.25
IDENTITY = """\
[identity]
source = "file"
path = "/run/machine/identity"
node_only = false
"""
CONFIGURATION = f"""\
provider = "oci"
volumes_dir = "/run/machine/volumes"
choice_file = "/run/machine/provider"

{IDENTITY}
[providers.oci]
directory = "/run/machine/oci"
layer_dir = "/run/machine/layers"
"""
PROGRAM = (sys.executable, "-P", "-m", "vmserver", "--config")
"""The agent's command; the configuration's path follows."""
_ETC = "/run/etc"
_RESOLV_CONF = Path("/etc/resolv.conf")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
# Source: linux/mount.h, linux/sched.h, asm-generic/unistd.h.
_MOUNT_SETATTR, _HERE, _RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 8, 32, 4096
_CLONE_NEWCGROUP = 0x02000000


def main(directory: str) -> None:
    """Run the VM."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    disk = os.open(directory, os.O_PATH | os.O_CLOEXEC)
    _say("up")
    words = read_line()
    if not words:
        return
    hardware = json.loads(words)
    _checked(_libc.unshare(_CLONE_NEWCGROUP), "unshare")
    _mount_all(disk)
    os.close(disk)
    agent = _Agent(hardware["behaviour"], hardware.get("configuration", CONFIGURATION))
    agent.follow()  # its Python loads modules while the network is set up
    network.set_up(hardware["address"], hardware["gateway"])
    _say("running")
    agent.keep()


def read_line() -> str:
    """Read one line of the input; "" at its end. Reads no further, so that `select` sees the next line."""
    with open(0, "rb", buffering=0, closefd=False) as raw:
        return raw.readline().decode()


def _say(word: str) -> None:
    print(word, flush=True)


# ---- file systems


def _mount_all(disk: int) -> None:
    """Mount the VM's file systems: the machine's read-only, and those that have to be its own."""
    with open("/proc/self/mountinfo") as file:
        kinds = [_cgroup_kind(line) for line in file]
    resolver = _text(_RESOLV_CONF)
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
    _checked(
        _libc.syscall(_MOUNT_SETATTR, _HERE, b"/", _RECURSIVE, attributes, ctypes.sizeof(attributes)),
        "mount_setattr",
    )
    plain = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _mount("tmpfs", "/run", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755")
    DISK.mkdir()
    _mount(f"/proc/self/fd/{disk}", str(DISK), "", _MS_BIND)
    _mount("", str(DISK), "", _MS_REMOUNT | _MS_BIND)
    _mount("proc", "/proc", "proc", plain)
    _mount("sysfs", "/sys", "sysfs", plain)
    _mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")  # noqa: S108
    if os.path.isdir("/dev/mqueue"):
        _mount("mqueue", "/dev/mqueue", "mqueue", plain)
    for name in ("upper", "work"):
        os.makedirs(f"{_ETC}/{name}", 0o755)
    _mount("etc", "/etc", "overlay", 0, f"lowerdir=/etc,upperdir={_ETC}/upper,workdir={_ETC}/work")
    if _RESOLV_CONF.is_symlink():  # to somewhere below /run
        _RESOLV_CONF.unlink()
        _RESOLV_CONF.write_text(resolver)
    _mount_cgroups([each for each in kinds if each])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _cgroup_kind(line: str) -> tuple[str, str, str] | None:
    """Return the type, name and controllers in a line of mountinfo, if it is a hierarchy's root."""
    fields, _, source = line.rstrip("\n").partition(" - ")
    kind, _, options = source.split(" ", 2)
    point = Path(fields.split()[4])
    if kind not in ("cgroup", "cgroup2") or not point.is_relative_to(cgroups.ROOT):
        return None
    return kind, point.name if point != cgroups.ROOT else "", options.partition(",")[2]


def _mount_cgroups(kinds: list[tuple[str, str, str]]) -> None:
    """Show the VM its own cgroup as the root: all of version 2, or all of version 1.

    Of a machine with both it sees version 1 alone: crun refuses the mixture."""
    old = [each for each in kinds if each[0] == "cgroup"]
    if not old:
        _mount("cgroup2", str(cgroups.ROOT), "cgroup2", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        own = cgroups.ROOT / "init"  # a cgroup that has others below it must have no process itself
        own.mkdir()
        (own / "cgroup.procs").write_text("0")
        cgroups.give_controllers(cgroups.ROOT)
        return
    _mount("cgroup", str(cgroups.ROOT), "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "mode=755")
    for _, name, controllers in old:
        target = cgroups.ROOT / name
        target.mkdir()
        _mount("cgroup", str(target), "cgroup", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, controllers)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = (source.encode(), target.encode(), kind.encode() or None, flags, options.encode() or None)
    _checked(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(words[3]), words[4]), f"mount {target}")


def _checked(outcome: int, what: str) -> None:
    if outcome < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


# ---- the agent


class _Agent:
    """Keeps the agent in the wanted state, and reaps every process that ends in the VM."""

    def __init__(self, behaviour: str, configuration: str) -> None:
        self._behaviour = behaviour
        self._agent: subprocess.Popen[bytes] | None = None
        self._due = 0.0  # when it is started again
        self._silent: socket.socket | None = None
        self._wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        (DISK / "vmserver.toml").write_text(configuration)
        (DISK / "tmp").mkdir(exist_ok=True)

    def keep(self) -> None:
        """Keep the VM running until the input ends."""
        while True:
            ready, _, _ = select.select([0, self._wake], [], [], _LOOK_SECONDS if self._due else None)
            if self._wake in ready:
                os.read(self._wake, 4096)
            if 0 in ready:
                line = read_line()
                if not line:
                    return
                self._behaviour = line.strip()
            self._reap()
            self.follow()

    def _reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if self._agent is not None and pid == self._agent.pid:
                self._agent.returncode = 0
                self._agent, self._due = None, time.monotonic() + _RESTART_SECONDS

    def follow(self) -> None:
        """Start or end the agent, or the listener that replaces a silent one, as the behaviour demands."""
        if self._behaviour != AGENT and self._agent is not None:
            self._agent.kill()
            self._agent.wait()
            self._agent = None
        if self._behaviour != SILENT and self._silent is not None:
            self._silent.close()
            self._silent = None
        if self._behaviour == SILENT and self._silent is None:
            self._silent = socket.create_server(("0.0.0.0", AGENT_PORT))  # noqa: S104
        if self._behaviour == AGENT and self._agent is None and time.monotonic() >= self._due:
            self._agent, self._due = self._started(), 0.0

    def _started(self) -> subprocess.Popen[bytes]:
        command = [*PROGRAM, str(DISK / "vmserver.toml")]
        environment = {**os.environ, "TMPDIR": str(DISK / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
        with (DISK / "agent.log").open("ab") as log:
            return subprocess.Popen(  # noqa: S603
                command, cwd=DISK, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
