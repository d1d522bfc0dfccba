# SPDX-License-Identifier: Apache-2.0
"""Resource usage of a process and its descendants, for VMs without cgroup v2 (proc(5)).

Processor time includes ended children only if their parent has waited for them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from infranetes_common.machine_usage import flat
from infranetes_common.processes import family
from infranetes_common.wire import vmserver as messages

_TICK_NANOS = 10**9 // os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def usage(leader: int, limit: int = 0) -> messages.Usage | None:
    """Measure `leader` and its descendants; None if there is no such process.

    :param limit: their memory limit in bytes; 0 for none."""
    result = messages.Usage(time_nanos=time.time_ns())
    for pid in family(leader):
        _add(result, pid)
    if not result.processes:
        return None
    memory = result.memory
    memory.working_set = memory.usage = memory.rss + memory.mapped_file
    memory.limit = limit
    return result


def _add(result: messages.Usage, pid: int) -> None:
    try:
        with open(f"/proc/{pid}/stat") as file:
            words = file.read().rpartition(")")[2].split()
        with open(f"/proc/{pid}/status") as file:
            sizes = flat(file.read().replace(":", "").replace("\t", " ").replace(" kB", ""))
    except OSError:
        return  # the process has just ended
    if len(words) < 22 or words[0] == "Z":
        return
    # From the third field of stat(5) on: state is 0, minflt 7, utime 11, num_threads 17, rss 21.
    minor, minor_waited, major, major_waited = (int(word) for word in words[7:11])
    user, system, user_waited, system_waited = (int(word) for word in words[11:15])
    result.processes += 1
    result.threads += int(words[17])
    result.cpu.user_nanos += (user + user_waited) * _TICK_NANOS
    result.cpu.system_nanos += (system + system_waited) * _TICK_NANOS
    result.cpu.total_nanos = result.cpu.user_nanos + result.cpu.system_nanos
    result.memory.page_faults += minor + minor_waited + major + major_waited
    result.memory.major_page_faults += major + major_waited
    anonymous = _kib(sizes, "RssAnon")
    result.memory.rss += anonymous
    result.memory.mapped_file += max(int(words[21]) * _PAGE - anonymous, 0)


def _kib(sizes: dict[str, int], name: str) -> int:
    return sizes.get(name, 0) * 1024


def total(usages: Iterable[messages.Usage]) -> messages.Usage:
    """Return the sum: the usage of a simulated VM, which consists of its containers alone."""
    result = messages.Usage(time_nanos=time.time_ns())
    result.cpu.SetInParent()
    for one in usages:
        result.processes += one.processes
        result.threads += one.threads
        for name in ("total_nanos", "user_nanos", "system_nanos"):
            setattr(result.cpu, name, getattr(result.cpu, name) + getattr(one.cpu, name))
        for name in ("usage", "working_set", "rss", "mapped_file", "page_faults", "major_page_faults"):
            setattr(result.memory, name, getattr(result.memory, name) + getattr(one.memory, name))
    return result
