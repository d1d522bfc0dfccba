# SPDX-License-Identifier: Apache-2.0
"""A real systemd with a journal of its own: process 1 of its own namespaces, on the machine's file system.

It has its own /run, journal and control groups, and of the machine's units only those of the journal. Its
network and its files are the machine's, and the machine's /proc shows its processes.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from twisted.internet import reactor as _reactor
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectError
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.protocol import Factory
from twisted.internet.threads import deferToThread
from zope.interface import implementer

from tests.harness.tools import need

reactor: Any = _reactor

_START_SECONDS = 60.0
_STOP_SECONDS = 30.0

# A shell script that ends with the test process, however that ends. $1: the root. It first makes a control
# group in each hierarchy, which becomes the root of the hierarchy for process 1.
_BOOT = """
name=infranetes-test-$$
for tree in $(awk '$3 == "cgroup" || $3 == "cgroup2" { print $2 }' /proc/mounts); do
    mkdir -p "$tree/$name"
    if [ -e "$tree/cpuset.cpus" ]; then
        cat "$tree/cpuset.cpus" >"$tree/$name/cpuset.cpus"
        cat "$tree/cpuset.mems" >"$tree/$name/cpuset.mems"
    fi 2>/dev/null
    if [ -e "$tree/cgroup.subtree_control" ]; then
        for controller in cpu memory pids cpuset; do
            echo "+$controller" >"$tree/cgroup.subtree_control"
        done 2>/dev/null
    fi
    echo 0 >"$tree/$name/cgroup.procs"
done
unshare --mount --pid --fork --uts --ipc --cgroup --kill-child sh -c "$INSIDE" sh "$1" &
child=$!
echo $child >"$1/unshare"
while kill -0 "$PARENT" 2>/dev/null && kill -0 $child 2>/dev/null && [ ! -e "$1/end" ]; do sleep 0.2; done
kill -9 $child 2>/dev/null
wait $child
for tree in $(awk '$3 == "cgroup" || $3 == "cgroup2" { print $2 }' /proc/mounts); do
    echo 0 >"$tree/cgroup.procs"
    for attempt in 1 2 3 4 5 6 7 8 9 10; do
        find "$tree/$name" -depth -type d -exec rmdir {} + 2>/dev/null
        [ -e "$tree/$name" ] || break
        sleep 0.1
    done
done
rm -rf "$1"
"""

# From inside, the machine can't be changed: its file system is read-only there, except for /tmp, where
# systemd makes units' own /dev, and /var/tmp, which is for temporary files too. The machine's own units are
# not known there, so none is started (some clean /tmp, set the clock or the kernel's settings). Only the
# network's settings can be changed, because our units may do so, and with systemd 257 no unit can write where
# systemd itself can't. A hierarchy may be mounted twice at its path, as for workers with a /sys of their own.
_INSIDE = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount --bind "$1/run" /run
trees=$(awk '($3 == "cgroup" || $3 == "cgroup2") && !seen[$2]++ { print $2 " " $3 " " $4 }' /proc/mounts)
case "$trees" in
    "/sys/fs/cgroup cgroup2"*) mount -t cgroup2 cgroup2 /sys/fs/cgroup ;;
    *)
        mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
        echo "$trees" | while read -r path kind options; do
            mkdir -p "$path"
            if [ "$kind" = cgroup2 ]; then mount -t cgroup2 cgroup2 "$path"; continue; fi
            mount -t cgroup -o "$(echo "$options" | sed 's/^rw,//; s/relatime,\\{0,1\\}//')" cgroup "$path"
        done ;;
esac
mount --bind /tmp /tmp
mount --bind /var/tmp /var/tmp
mount --bind "$1" "$1"
mount --bind /proc/sys /proc/sys
mount --bind /proc/sys/net /proc/sys/net
mount -o remount,bind,ro /proc/sys
mount -o remount,bind,ro /
exec env -i container=infranetes-test PATH="$PATH" SYSTEMD_UNIT_PATH=/run/systemd/units-of-the-test \\
    /lib/systemd/systemd --system --unit=test.target --log-target=journal --show-status=no
"""

_UNITS = {
    "test.target": "[Unit]\nDefaultDependencies=no\nAfter=systemd-journald.service\n"
    "Requires=systemd-journald.socket systemd-journald.service\n",
    "sysinit.target": "[Unit]\nDefaultDependencies=no\n",
    "basic.target": "[Unit]\nDefaultDependencies=no\n",
    "shutdown.target": "[Unit]\nDefaultDependencies=no\nRefuseManualStart=yes\n",
}
_MACHINES = ("systemd-journald.socket", "systemd-journald.service")
_JOURNALD = "[Journal]\nReadKMsg=no\nStorage=volatile\nRuntimeMaxUse=%s\n%s"


_CONNECTOR = """
import socket, sys
asked = socket.socket(fileno=0)
while asked.recv(1):
    with socket.socket(socket.AF_UNIX) as made:
        made.connect(sys.argv[1])
        socket.send_fds(asked, [b"!"], [made.fileno()])
"""


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Systemd:
    """A systemd manager. :param journal: its journal's largest size. :param lines: more of journald.conf."""

    def __init__(self, journal: str = "64M", lines: str = "") -> None:
        self.root = Path(tempfile.mkdtemp(prefix="systemd-"))
        self.root.chmod(0o755)
        self._journal = (journal, lines)
        self._asking: socket.socket | None = None
        self._one_at_a_time = threading.Lock()
        self._started = False

    @property
    def run(self) -> Path:
        """Its /run, seen from outside."""
        return self.root / "run"

    @property
    def socket(self) -> Path:
        """The manager's private D-Bus socket."""
        return self.run / "systemd" / "private"

    def start(self) -> Systemd:
        """Start it, and wait until it and its journal serve."""
        need("journalctl")
        units = dict(_UNITS)
        for name in _MACHINES:
            units[name] = Path("/lib/systemd/system", name).read_text()
        for file, text in (
            *((f"systemd/units-of-the-test/{name}", text) for name, text in units.items()),
            ("systemd/journald.conf.d/test.conf", _JOURNALD % self._journal),
            ("lock/.keep", ""),
        ):
            path = self.run / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        environment = {**os.environ, "PARENT": str(os.getpid()), "INSIDE": _INSIDE}
        with open(self.root / "log", "ab") as log:
            # It is not a child of this process, so that tests can share it.
            subprocess.run(
                ["setsid", "--fork", "sh", "-c", _BOOT, "systemd-keeper", str(self.root)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd="/", check=True,
            )  # fmt: skip
        self._started = True
        until = time.monotonic() + _START_SECONDS
        while not (self.socket.exists() and (self.run / "systemd/journal/socket").exists()):
            if time.monotonic() > until:
                said = (self.root / "log").read_text(errors="replace")[-4000:]
                self.stop()
                raise AssertionError(f"systemd does not start: {said}")
            time.sleep(0.05)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as first:  # makes the journal's file
            first.sendto(b"MESSAGE=the test begins\n", str(self.run / "systemd/journal/socket"))
        while not list(self.run.glob("log/journal/*/system.journal")) and time.monotonic() < until:
            time.sleep(0.02)
        return self

    def connected(self) -> Any:
        """Return a connection to the manager, made in its PID namespace: it accepts no other. Blocks."""
        with self._one_at_a_time:
            return self._connected()

    def _connected(self) -> Any:
        if self._asking is None:
            ours, its = socket.socketpair()
            inside = ["nsenter", f"--target={self.pid}", "--pid", sys.executable, "-ISc", _CONNECTOR]
            command = ["setsid", "--fork", *inside, str(self.socket)]
            subprocess.run(command, stdin=its.fileno(), cwd="/", check=True)
            its.close()
            self._asking = ours
        self._asking.sendall(b"?")
        _, (descriptor,), _, _ = socket.recv_fds(self._asking, 1, 1)
        return socket.socket(fileno=descriptor)

    def outside(self, pid: int) -> int:
        """Return the process id that `pid` of the manager's namespace has in ours; 0: there is none."""
        own = os.readlink(f"/proc/{self.pid}/ns/pid")
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    status = (entry / "status").read_text()
                    inside = os.readlink(entry / "ns/pid") == own
                except OSError:
                    continue
                if inside and status.partition("NSpid:")[2].partition("\n")[0].split()[-1] == str(pid):
                    return int(entry.name)
        return 0

    @property
    def pid(self) -> int:
        """The manager's process id in our namespace."""
        for first in _children(int((self.root / "unshare").read_text())):
            return first
        raise AssertionError("systemd has ended")

    def stop(self) -> None:
        """End it with everything that it runs, and remove its files. Idempotent."""
        if self._asking is not None:
            self._asking.close()
            self._asking = None
        if self._started:
            self._started = False
            (self.root / "end").touch()
            until = time.monotonic() + _STOP_SECONDS
            while self.root.exists() and time.monotonic() < until:
                time.sleep(0.02)
        shutil.rmtree(self.root, ignore_errors=True)


@implementer(IStreamClientEndpoint)
class Inside:
    """A client endpoint that connects to the manager."""

    def __init__(self, manager: Systemd) -> None:
        self._manager = manager

    def connect(self, factory: Any) -> Deferred[Any]:
        return Deferred.fromCoroutine(self._connect(factory))

    async def _connect(self, factory: Any) -> Any:
        kept: list[Any] = []

        class Keeping(Factory):
            def buildProtocol(self, addr: Any) -> Any:
                kept.append(factory.buildProtocol(addr))
                return kept[0]

        try:
            with await deferToThread(self._manager.connected) as connection:
                reactor.adoptStreamConnection(connection.fileno(), socket.AF_UNIX, Keeping())
        except (OSError, AssertionError, ValueError) as error:
            raise ConnectError(string=str(error)) from error
        return kept[0]


_shared: list[Systemd] = []


def shared() -> Systemd:
    """Return the manager shared by all tests of this process that leave it as they found it."""
    if not _shared:
        manager = Systemd()
        atexit.register(manager.stop)
        _shared.append(manager.start())
    return _shared[0]
