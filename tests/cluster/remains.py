# SPDX-License-Identifier: Apache-2.0
"""What a cluster has left on the machine, seen from outside, and its removal."""

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
    """Parent, and when it was started: what tells it from another of the same number.

    :raise OSError: there is no such process."""
    # proc(5): pid (comm) state ppid ... starttime as the 22nd; comm may hold anything
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1]), fields[19]


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def child_of(pid: int) -> int:
    """The child of that process, once it has one; 0: it ended without."""
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until and Path(f"/proc/{pid}/exe").exists():
        for each in _processes():
            with contextlib.suppress(OSError):
                if _status(each)[0] == pid:
                    return each
        time.sleep(0.01)
    return 0


class Namespaces:
    """Those of a process. While they are held here, no others can have their numbers."""

    def __init__(self, pid: int) -> None:
        self._held = {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in _KINDS}

    def __enter__(self) -> Namespaces:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)

    def processes(self) -> list[str]:
        """All processes that have one of them, in words."""
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
        """Where one of them is mounted, which keeps it without any process."""
        names = {f"{kind}:[{os.fstat(held).st_ino}]" for kind, held in self._held.items()}
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        return [line.split()[4] for line in lines if line.split()[3] in names]


def note(paths: Paths, first: int) -> None:
    """Write down which process takes the whole cluster with it when it is killed."""
    with contextlib.suppress(OSError):
        (paths.place / "first").write_text(json.dumps([first, _status(first)[1]]))


def remove(paths: Paths) -> None:
    """Take away whatever there is of the cluster; nothing: nothing to do."""
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
    """Return what is left of it besides processes, in words: files, mounts, control groups."""
    files = [str(path) for path in (paths.place, *paths.scripts()) if path.exists()]
    return [*files, *world.mounted_below(paths.place), *cgroups.left(paths.id)]
