# SPDX-License-Identifier: Apache-2.0
"""Resource usage of a control group (cgroup v2).

Source: Linux Documentation/admin-guide/cgroup-v2.rst and Documentation/accounting/psi.rst.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from infranetes_common.machine_usage import MAX_FILE, MAX_WORDS, first_lines, flat, number, pressure
from infranetes_common.wire import vmserver as messages

FILES = (
    "cpu.stat",
    "cpu.pressure",
    "io.stat",
    "io.pressure",
    "memory.current",
    "memory.stat",
    "memory.max",
    "memory.peak",
    "memory.swap.current",
    "memory.swap.max",
    "memory.events",
    "memory.pressure",
    "pids.current",
    "pids.max",
    "cgroup.procs",
)
MAX_DISKS = 64


def read(directory: Path) -> dict[str, str]:
    """Read a control group's files, by name.

    Files that can't be read are left out: an older kernel has fewer, PSI may be off, the group may be
    gone."""
    found = {}
    for name in FILES:
        try:
            with open(directory / name, "rb", buffering=0) as file:
                found[name] = _whole(file.fileno()).decode("ascii", "replace")
        except OSError:
            continue
    return found


def _whole(descriptor: int) -> bytes:
    parts, size = [], 0
    while size < MAX_FILE and (part := os.read(descriptor, 65536)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def of_process(pid: int) -> str:
    """Return a process's cgroup v2 path relative to the root; "" if there is none, or no such process."""
    try:
        with open(f"/proc/{pid}/cgroup") as file:
            own = [line[3:].strip() for line in file if line.startswith("0::/")]
    except OSError:
        return ""
    return own[0].lstrip("/") if own and ".." not in own[0].split("/") else ""


def usage(files: Mapping[str, str], time_nanos: int) -> messages.Usage | None:
    """Parse the files of `read`; None without cpu.stat."""
    if "cpu.stat" not in files:
        return None
    result = messages.Usage(time_nanos=time_nanos)
    _cpu(result.cpu, flat(files["cpu.stat"]))
    if "memory.current" in files:
        _memory(result.memory, files)
    result.processes = files.get("cgroup.procs", "").count("\n")
    result.threads = number(files.get("pids.current", ""))
    result.threads_limit = number(files.get("pids.max", ""))
    for line in first_lines(files.get("io.stat", ""), MAX_DISKS):
        disk = _disk(line)
        if disk is not None:
            result.disks.append(disk)
    for kind in ("cpu", "memory", "io"):
        found = pressure(files.get(f"{kind}.pressure", ""))
        if found is not None:
            getattr(result, f"{kind}_pressure").CopyFrom(found)
    return result


def _cpu(cpu: messages.Cpu, stat: Mapping[str, int]) -> None:
    cpu.total_nanos = stat.get("usage_usec", 0) * 1000
    cpu.user_nanos = stat.get("user_usec", 0) * 1000
    cpu.system_nanos = stat.get("system_usec", 0) * 1000
    cpu.periods = stat.get("nr_periods", 0)
    cpu.throttled_periods = stat.get("nr_throttled", 0)
    cpu.throttled_nanos = stat.get("throttled_usec", 0) * 1000


def _memory(memory: messages.Memory, files: Mapping[str, str]) -> None:
    stat, events = flat(files.get("memory.stat", "")), flat(files.get("memory.events", ""))
    memory.usage = number(files["memory.current"])
    memory.inactive_file = stat.get("inactive_file", 0)
    memory.active_file = stat.get("active_file", 0)
    memory.working_set = max(memory.usage - memory.inactive_file, 0)
    memory.rss = stat.get("anon", 0)
    memory.cache = stat.get("file", 0)
    memory.mapped_file = stat.get("file_mapped", 0)
    memory.kernel = stat.get("kernel", 0) or sum(
        stat.get(name, 0) for name in ("kernel_stack", "pagetables", "percpu", "slab")
    )
    memory.page_faults = stat.get("pgfault", 0)
    memory.major_page_faults = stat.get("pgmajfault", 0)
    memory.highest_usage = number(files.get("memory.peak", ""))
    memory.limit = number(files.get("memory.max", ""))
    memory.swap = number(files.get("memory.swap.current", ""))
    swap_limit = files.get("memory.swap.max", "").strip()
    if swap_limit.isdecimal():
        memory.swap_limit.value = number(swap_limit)
    memory.limit_hits = events.get("max", 0)
    memory.oom_kills = events.get("oom_kill", 0)


def _disk(line: str) -> messages.Disk | None:
    """Parse a line of io.stat: ``8:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=0 dios=0``."""
    device, *pairs = line.split(None, MAX_WORDS)[:MAX_WORDS] or [""]
    found = {name: number(value) for name, equals, value in (pair.partition("=") for pair in pairs) if equals}
    if not found:
        return None
    return messages.Disk(
        device=device[:64],
        read_bytes=found.get("rbytes", 0),
        written_bytes=found.get("wbytes", 0),
        reads=found.get("rios", 0),
        writes=found.get("wios", 0),
    )
