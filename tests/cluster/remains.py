# SPDX-License-Identifier: Apache-2.0
"""Finds and removes what a cluster has left on the machine, from outside of its namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path

from tests.cluster import cgroups, world
from tests.cluster.paths import Paths

_KINDS = ("pid", "net", "mnt")
_START_SECONDS = 10.0


def _status(pid: int) -> tuple[int, str]:
    """Return a process's parent, and its start time, which tells it from another with the same id.

    :raise OSError: there is no such process."""
    # proc(5): pid (comm) state ppid ... starttime as the 22nd; comm may hold any character
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1]), fields[19]


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def child_of(pid: int) -> int:
    """Wait until that process has a child, and return it; 0: the process ended without one."""
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until and Path(f"/proc/{pid}/exe").exists():
        for each in _processes():
            with contextlib.suppress(OSError):
                if _status(each)[0] == pid:
                    return each
        time.sleep(0.01)
    return 0


class Namespaces:
    """The namespaces of a process. While this object holds them, no others can have their numbers."""

    def __init__(self, pid: int) -> None:
        self._held = {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in _KINDS}

    def __enter__(self) -> Namespaces:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)

    def processes(self) -> list[str]:
        """Describe all processes that are in one of them."""
        found = []
        numbers = {kind: os.fstat(descriptor).st_ino for kind, descriptor in self._held.items()}
        for pid in _processes():
            with contextlib.suppress(OSError):
                if any(
                    os.stat(f"/proc/{pid}/ns/{kind}").st_ino == number for kind, number in numbers.items()
                ):
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                    found.append(f"process {pid} ({command.decode(errors='replace')[:100]})")
        return found

    def mounts(self) -> list[str]:
        """Return where one of them is mounted, which keeps it alive without any process."""
        names = {f"{kind}:[{os.fstat(held).st_ino}]" for kind, held in self._held.items()}
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        return [line.split()[4] for line in lines if line.split()[3] in names]


def note(paths: Paths, first: int) -> None:
    """Record the process whose death ends the whole cluster."""
    with contextlib.suppress(OSError):
        (paths.place / "first").write_text(json.dumps([first, _status(first)[1]]))


def remove(paths: Paths) -> None:
    """Remove everything that is left of the cluster. Idempotent."""
    _kill(paths)
    cgroups.remove(paths.id)
    shutil.rmtree(paths.place, ignore_errors=True)
    for script in paths.scripts():
        script.unlink(missing_ok=True)


def _kill(paths: Paths) -> None:
    try:
        first, started = json.loads((paths.place / "first").read_text())
    except (OSError, ValueError):
        return
    until = time.monotonic() + _START_SECONDS
    with contextlib.suppress(OSError):
        while _status(first)[1] == started and time.monotonic() < until:
            os.kill(first, signal.SIGKILL)
            time.sleep(0.05)


def found(paths: Paths) -> list[str]:
    """Describe what is left of the cluster besides processes: files, mounts, control groups."""
    files = [str(path) for path in (paths.place, *paths.scripts()) if path.exists()]
    return [*files, *world.mounted_below(paths.place), *cgroups.left(paths.id)]
