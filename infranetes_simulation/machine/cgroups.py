# SPDX-License-Identifier: Apache-2.0
"""A VM's cgroup, in every hierarchy of the machine: of version 2, of version 1, or of both.

Source: Linux Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/cpusets.rst.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_CPUSET = ("cpuset.cpus", "cpuset.mems")
_PAUSE_SECONDS = 0.02


def hierarchies(root: Path = ROOT) -> list[Path]:
    """Return the roots of the hierarchies."""
    if (root / "cgroup.procs").exists():
        return [root]
    found = []
    with contextlib.suppress(OSError):
        found = [each for each in sorted(root.iterdir()) if (each / "cgroup.procs").exists()]
    return found


def join(path: str, pid: int, root: Path = ROOT) -> None:
    """Make a cgroup and move a process into it. :raise OSError: a hierarchy refuses."""
    for top in hierarchies(root):
        directory = top
        for name in path.split("/"):
            directory /= name
            directory.mkdir(exist_ok=True)
            _let_processes_in(directory)
        (directory / "cgroup.procs").write_text(str(pid))


def _let_processes_in(directory: Path) -> None:
    """Let processes into a new cgroup, with the controllers that the one above it has."""
    if (directory.parent / "cgroup.controllers").exists():
        give_controllers(directory.parent)
        return
    for name in _CPUSET:  # until they are set, a cgroup of version 1 takes no process
        file = directory / name
        if file.exists() and not file.read_text().strip():
            file.write_text((directory.parent / name).read_text())


def give_controllers(directory: Path) -> None:
    """Enable all available controllers for the cgroups (v2) below `directory`."""
    for name in (directory / "cgroup.controllers").read_text().split():
        with contextlib.suppress(OSError):
            (directory / "cgroup.subtree_control").write_text(f"+{name}")


def remove(path: str, seconds: float = 0.0, root: Path = ROOT) -> bool:
    """Remove a cgroup and all below it, and those above it that are then empty.

    :param seconds: how long to wait for its last processes to be gone. Blocks so long.
    :return: whether it is gone.
    """
    until = time.monotonic() + seconds
    while True:
        left = False
        for top in hierarchies(root):
            for directory, _, _ in os.walk(top / path, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(directory)
            left = left or (top / path).exists()
            for parent in Path(path).parents[:-1]:
                with contextlib.suppress(OSError):
                    (top / parent).rmdir()
        if not left or time.monotonic() > until:
            return not left
        time.sleep(_PAUSE_SECONDS)
