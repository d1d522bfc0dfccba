# SPDX-License-Identifier: Apache-2.0
"""The control groups in which kubelets keep those of their pods, in every hierarchy of the machine.

The first node's has the name of the cluster; another node's has a dot and the node's name after that."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

#: The controllers without which kubelet does not start if pods are to have control groups.
_NEEDED = {"cpu", "cpuset", "memory", "pids"}


def _hierarchies() -> list[tuple[Path, set[str]]]:
    """Return the hierarchies' mount points, each with its controllers."""
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
    """Make the group in every hierarchy. Return whether kubelet can work with it; if not, it is removed."""
    usable: set[str] = set()
    with contextlib.suppress(OSError):
        for point, controllers in _hierarchies():
            group = point / name
            group.mkdir(exist_ok=True)
            _weigh(group)
            if (group / "cgroup.controllers").exists():  # version 2
                given = set((group / "cgroup.controllers").read_text().split())
                # kubelet requires those of these controllers that the machine has.
                controllers = given if given >= controllers & {*_NEEDED, "hugetlb"} else set()
            usable |= controllers
    if usable >= _NEEDED:
        return True
    remove(name)
    return False


def _weigh(group: Path) -> None:
    """Give the group the weight of many processes. With the default weight it would count as much as each
    single process of the machine beside it, and pods would wait for all of these."""
    for file, weight in (("cpu.shares", "32768"), ("cpu.weight", "3200")):
        with contextlib.suppress(OSError):
            if (group / file).exists():
                (group / file).write_text(weight)


def _groups(name: str) -> Iterator[Path]:
    for point, _ in _hierarchies():
        yield from point.glob(name)
        yield from point.glob(f"{name}.*")


def remove(name: str) -> None:
    """Remove a cluster's groups, or one of them, with all groups inside, which must have no processes."""
    for group in _groups(name):
        for directory, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)


def left(name: str) -> list[str]:
    """Return the paths of the cluster's groups that still exist."""
    return [str(group) for group in _groups(name)]
