# SPDX-License-Identifier: Apache-2.0
"""The control groups in which kubelets keep their pods', in every hierarchy of the machine.

A cluster's is called as the cluster; those of its other nodes have a dot and the node's name after that."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
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
            _weigh(group)
            if (group / "cgroup.controllers").exists():  # version 2
                given = set((group / "cgroup.controllers").read_text().split())
                # kubelet wants whatever the machine has of these.
                controllers = given if given >= controllers & {*_NEEDED, "hugetlb"} else set()
            usable |= controllers
    if usable >= _NEEDED:
        return True
    remove(name)
    return False


def _weigh(group: Path) -> None:
    """Have the group count as many processes, which it is: beside it, each of the machine's counts as much as
    a group of the default weight, and pods would wait for them all."""
    for file, weight in (("cpu.shares", "32768"), ("cpu.weight", "3200")):
        with contextlib.suppress(OSError):
            if (group / file).exists():
                (group / file).write_text(weight)


def _groups(name: str) -> Iterator[Path]:
    for point, _ in _hierarchies():
        yield from point.glob(name)
        yield from point.glob(f"{name}.*")


def remove(name: str) -> None:
    """Remove a cluster's, or one, with all groups in it, which have to be without processes."""
    for group in _groups(name):
        for directory, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)


def left(name: str) -> list[str]:
    """Where there are some of the cluster still."""
    return [str(group) for group in _groups(name)]
