# SPDX-License-Identifier: Apache-2.0
"""Resource usage of the whole VM, from proc(5)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from infranetes_common.wire import vmserver as messages
from vmserver.stats.cgroup import MAX_FILE, first_lines, flat, pressure

FILES = (
    "stat",
    "meminfo",
    "vmstat",
    "net/dev",
    "net/route",
    "pressure/cpu",
    "pressure/memory",
    "pressure/io",
)
# Prefixes of interfaces whose traffic stays in the VM; the others carry the pod's.
_INNER = ("lo", "docker", "veth", "br-", "dummy", "ifb")
MAX_CARDS = 64
_TICK_NANOS = 10**9 // os.sysconf("SC_CLK_TCK")


def read(names: Sequence[str] = FILES, proc: Path = Path("/proc")) -> dict[str, str]:
    """Read files of /proc, by name; files that can't be read are left out."""
    found = {}
    for name in names:
        try:
            with (proc / name).open(errors="replace") as file:
                found[name] = file.read(MAX_FILE)
        except OSError:
            continue
    return found


def usage(files: Mapping[str, str]) -> messages.Usage:
    """Parse the files of `read`. The numbers of processes and threads are left to the caller."""
    result = messages.Usage(time_nanos=time.time_ns())
    _cpu(result.cpu, files.get("stat", ""))
    _memory(result.memory, files)
    for kind in ("cpu", "memory", "io"):
        found = pressure(files.get(f"pressure/{kind}", ""))
        if found is not None:
            getattr(result, f"{kind}_pressure").CopyFrom(found)
    return result


def _cpu(cpu: messages.Cpu, stat: str) -> None:
    line = stat.partition("\n")[0].split()
    if len(line) < 8 or line[0] != "cpu":
        return
    user, nice, system, _idle, _wait, irq, softirq = (int(word) for word in line[1:8])
    cpu.user_nanos = (user + nice) * _TICK_NANOS
    cpu.system_nanos = (system + irq + softirq) * _TICK_NANOS
    cpu.total_nanos = cpu.user_nanos + cpu.system_nanos


def _memory(memory: messages.Memory, files: Mapping[str, str]) -> None:
    text = files.get("meminfo", "").replace(" kB", "").replace(":", "")
    sizes = flat("\n".join(" ".join(line.split()) for line in first_lines(text)))
    events = flat(files.get("vmstat", ""))

    def size(name: str) -> int:
        return sizes.get(name, 0) * 1024

    memory.limit = size("MemTotal")
    memory.usage = max(memory.limit - size("MemFree"), 0)
    memory.inactive_file = size("Inactive(file)")
    memory.active_file = size("Active(file)")
    memory.working_set = max(memory.usage - memory.inactive_file, 0)
    memory.rss = size("AnonPages")
    memory.cache = size("Cached")
    memory.mapped_file = size("Mapped")
    memory.kernel = size("Slab") + size("KernelStack") + size("PageTables")
    memory.swap = max(size("SwapTotal") - size("SwapFree"), 0)
    if size("SwapTotal"):
        memory.swap_limit.value = size("SwapTotal")
    memory.page_faults = events.get("pgfault", 0)
    memory.major_page_faults = events.get("pgmajfault", 0)
    memory.oom_kills = events.get("oom_kill", 0)


def cards(files: Mapping[str, str]) -> list[messages.NetworkCard]:
    """Parse the counters of the network cards; the one with the default route comes first."""
    found: list[messages.NetworkCard] = []
    for line in first_lines(files.get("net/dev", ""))[2:]:
        if len(found) == MAX_CARDS:
            break
        name, colon, rest = line.partition(":")
        name, words = name.strip(), rest.split(None, 16)
        if not colon or name.startswith(_INNER) or len(words) < 12:
            continue
        counts = [int(word) for word in words[:12]]
        found.append(
            messages.NetworkCard(
                name=name,
                received_bytes=counts[0],
                received_packets=counts[1],
                receive_errors=counts[2],
                receive_drops=counts[3],
                sent_bytes=counts[8],
                sent_packets=counts[9],
                send_errors=counts[10],
                send_drops=counts[11],
            )
        )
    default = _default(files.get("net/route", ""))
    return sorted(found, key=lambda card: card.name != default)


def _default(routes: str) -> str:
    """Return the card of the IPv4 default route; "" if there is none."""
    for line in first_lines(routes)[1:]:
        words = line.split()
        if len(words) > 7 and words[1] == words[7] == "00000000":
            return words[0]
    return ""
