# SPDX-License-Identifier: Apache-2.0
"""Limits that are written to a running container's cgroup (v2).

These are the limits that the Engine API lacks, and all limits when they are changed later, because crun
refuses the changes that this Docker requests. crun(1) puts a container's processes into a group "container"
below its scope, and the same limits on both. Source: Linux Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri
from vmserver.containers.resources import check_files, check_unified, cpu_weight

CGROUP2 = Path("/sys/fs/cgroup")

_SUBGROUP = "container"


def extra_files(limits: cri.LinuxContainerResources) -> dict[str, str]:
    """Return file and value of each limit that the engine does not support.

    :raise InvalidArgument: a limit is malformed; names the field."""
    check_files(limits)
    found = {}
    for page in limits.hugepage_limits:
        found[f"hugetlb.{page.page_size}.max"] = str(page.limit)
    for name, value in limits.unified.items():
        found[name] = value
    return found


def engine_files(limits: cri.LinuxContainerResources, current: Callable[[str], str]) -> dict[str, str]:
    """Return file and value of each limit that the engine does support, except those that are 0 or empty.

    :param current: returns a file's present content.
    :raise InvalidArgument: more memory is in use than the limit allows."""
    found = {}
    if limits.cpu_quota or limits.cpu_period:
        quota, period = [*current("cpu.max").split(), "max", "100000"][:2]
        if limits.cpu_quota:
            quota = str(limits.cpu_quota) if limits.cpu_quota > 0 else "max"
        found["cpu.max"] = f"{quota} {limits.cpu_period or period}"
    if limits.cpu_shares:
        found["cpu.weight"] = str(cpu_weight(limits.cpu_shares))
    memory, swap = limits.memory_limit_in_bytes, limits.memory_swap_limit_in_bytes
    if memory:
        used = int(current("memory.current") or 0)
        if used > memory > 0:
            raise InvalidArgument(f"resources.memory_limit_in_bytes {memory}: {used} bytes are in use")
        found["memory.max"] = str(memory) if memory > 0 else "max"
        found["memory.swap.max"] = "max" if min(memory, swap) < 0 else str(max(swap - memory, 0))
    for name in ("cpus", "mems"):
        if value := getattr(limits, f"cpuset_{name}"):
            found[f"cpuset.{name}"] = value
    return found


def is_v2(cgroup2: Path = CGROUP2) -> bool:
    """Return whether this VM has cgroup v2."""
    return (cgroup2 / "cgroup.controllers").exists()


def check(limits: cri.LinuxContainerResources, cgroup2: Path = CGROUP2) -> None:
    """Validate limits. :raise InvalidArgument: one is malformed, or needs cgroup v2 and the VM has none."""
    check_files(limits)
    if not is_v2(cgroup2):
        check_unified(limits)


def apply(
    pid: int,
    limits: cri.LinuxContainerResources,
    cgroup2: Path = CGROUP2,
    *,
    every: bool = False,
    proc: Path = Path("/proc"),
) -> None:
    """Apply limits to the container whose first process is `pid`.

    A page size that the VM does not have is left out: there is nothing to limit.

    :param every: whether to include the limits that the engine supports.
    :raise InvalidArgument: the kernel refuses a value.
    """
    if not every and not extra_files(limits):
        return
    try:
        group = (proc / str(pid) / "cgroup").read_text()
    except OSError:
        return  # the process has ended
    own = [line[3:] for line in group.splitlines() if line.startswith("0::/")]
    if not own or own[0] == "/":
        return
    leaf = cgroup2 / own[0].lstrip("/")
    directories = [leaf.parent, leaf] if leaf.name == _SUBGROUP else [leaf]
    wanted = extra_files(limits)
    if every:
        wanted = {**engine_files(limits, lambda name: _read(directories[0] / name)), **wanted}
    for name, value in wanted.items():
        files = [directory / name for directory in directories if (directory / name).exists()]
        if not files and leaf.exists() and not name.startswith(("hugetlb.", "memory.swap.")):
            raise InvalidArgument(f"resources: {name} = {value!r}: the VM's kernel has no such limit")
        for file in files:
            _write(file, name, value, leaf)


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _write(file: Path, name: str, value: str, leaf: Path) -> None:
    try:
        file.write_text(value)
    except OSError as error:
        if leaf.exists():
            raise InvalidArgument(f"resources: {name} = {value!r}: {error.strerror}") from error
