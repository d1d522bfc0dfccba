# SPDX-License-Identifier: Apache-2.0
"""The control group in which kubelet keeps its pods', in every hierarchy of the machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

#: Without these kubelet does not start with control groups of pods.
_NEEDED = {"cpu", "cpuset", "memory", "pids"}


def _hierarchies() -> list[tuple[Path, set[str]]]:
    """Mount points, each with its controllers."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, source = line.partition(" - ")
        kind, _, options = source.split(" ", 2)
        point = Path(fields.split()[4])
        if kind == "cgroup":
            found.append((point, set(options.split()[-1].split(","))))
        elif kind == "cgroup2":
            with contextlib.suppress(OSError):
                found.append((point, set((point / "cgroup.controllers").read_text().split())))
    return found


def make(name: str) -> bool:
    """Have the group everywhere. Whether kubelet can work with it; otherwise there is none."""
    usable: set[str] = set()
    with contextlib.suppress(OSError):
        for point, controllers in _hierarchies():
            group = point / name
            group.mkdir(exist_ok=True)
            if (group / "cgroup.controllers").exists():  # version 2
                given = set((group / "cgroup.controllers").read_text().split())
                # kubelet wants whatever the machine has of these.
                controllers = given if given >= controllers & {*_NEEDED, "hugetlb"} else set()
            usable |= controllers
    if usable >= _NEEDED:
        return True
    remove(name)
    return False


def remove(name: str) -> None:
    """Remove it with all groups in it, which have to be without processes."""
    for point, _ in _hierarchies():
        for directory, _, _ in os.walk(point / name, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)


def left(name: str) -> list[str]:
    """Where it is still there."""
    return [str(point / name) for point, _ in _hierarchies() if (point / name).exists()]
