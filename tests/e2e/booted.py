# SPDX-License-Identifier: Apache-2.0
"""A clean root whose systemd is booted in namespaces of its own, so that units run as on a node."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.cleanroot import CleanRoot

BOOT_SECONDS = 60.0
CGROUPS = Path("/sys/fs/cgroup")
# Sets up the root's own mounts, devices and control groups, then runs systemd as the first process.
BOOT = """
set -e
root=$1
shift
legacy=
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    mount -t cgroup2 cgroup "$root/sys/fs/cgroup"
else
    mount -t tmpfs tmpfs "$root/sys/fs/cgroup"
    mkdir "$root/sys/fs/cgroup/systemd" "$root/sys/fs/cgroup/unified"
    mount -t cgroup -o none,name=systemd cgroup "$root/sys/fs/cgroup/systemd"
    mount -t cgroup2 cgroup "$root/sys/fs/cgroup/unified"
    # As the machine has them: systemd would join some, and nobody finds those that it then can't mount.
    legacy_controllers=$(sed -n 's/^.* - cgroup cgroup rw,//p' /proc/self/mountinfo | grep -v name= | sort -u)
    for controllers in $legacy_controllers; do
        mkdir "$root/sys/fs/cgroup/$controllers"
        mount -t cgroup -o "$controllers" cgroup "$root/sys/fs/cgroup/$controllers"
    done
    legacy=SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1 # without it Debian 13's refuses such a machine
fi
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/dev"
for device in null zero full random urandom tty "$@"; do
    mkdir -p "$(dirname "$root/dev/$device")"
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,gid=5 devpts "$root/dev/pts" # units' own /dev has both
ln -s pts/ptmx "$root/dev/ptmx"
cd "$root"
pivot_root . mnt
umount -l /mnt
mount --make-rshared / # as systemd does on a machine, though not in a container
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd $legacy
"""


class Booted:
    """A systemd in `root`, which runs until `end`.

    :param network: the network namespace that it is in; without one it has its own, which can't be reached.
    :param devices: this machine's devices, below /dev, that it has besides those that all systems need.
    :param seconds: for all units to have started.
    """

    def __init__(
        self,
        root: CleanRoot,
        network: Path | None = None,
        devices: Sequence[str] = (),
        seconds: float = BOOT_SECONDS,
    ) -> None:
        hierarchy = CGROUPS if (CGROUPS / "cgroup.controllers").exists() else CGROUPS / "systemd"
        self._cgroup = hierarchy / root.path.name
        self._cgroup.mkdir()
        others = ("nsenter", f"--net={network}") if network else ()
        own = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc", "--cgroup")
        net = () if network else ("--net",)
        enter = f'echo 0 >{self._cgroup}/cgroup.procs && exec "$@"'
        self._process = subprocess.Popen(
            ["sh", "-c", enter, "sh", *others, *own, *net, "sh", "-c", BOOT, "sh", root.path, *devices],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._wait_booted(seconds)
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        """Systemd's process id, seen from outside; 0: it does not run yet."""
        path = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        with contextlib.suppress(OSError, IndexError):
            return int(path.read_text().split()[0])
        return 0

    def path(self, inside: str) -> Path:
        """Return a path of the booted system, as seen from outside."""
        return Path(f"/proc/{self.pid}/root") / inside.lstrip("/")

    def run(self, *command: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run to the end; output and errors together in `stdout`. `timeout`: seconds."""
        enter = (
            "nsenter",
            "--target",
            str(self.pid),
            "--mount",
            "--pid",
            "--net",
            "--uts",
            "--ipc",
            "--cgroup",
        )
        return subprocess.run(
            [*enter, *command],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
        )

    def systemctl(self, *arguments: str) -> str:
        """Run systemctl, which may fail, and return its output."""
        return self.run("systemctl", "--no-pager", *arguments).stdout.strip()

    def _wait_booted(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        state = ""
        while time.monotonic() < until:
            if self.pid and (self.path("run/systemd/private")).exists():
                state = self.systemctl("is-system-running")
                if state in ("running", "degraded"):
                    return
            if self._process.poll() is not None:
                raise AssertionError("systemd ended while it booted")
            time.sleep(0.2)
        raise AssertionError(f"systemd does not boot: {state}; {self.systemctl('list-jobs')}")

    def end(self) -> None:
        """Kill all its processes, and remove its control groups."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
        else:
            self._process.kill()
        self._process.wait()
        until = time.monotonic() + 10
        while self._cgroup.exists() and time.monotonic() < until:
            for directory, _, _ in os.walk(self._cgroup, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(directory)
            time.sleep(0.05)
