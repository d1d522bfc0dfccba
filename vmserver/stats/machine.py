"""The whole machine's figures, from proc(5)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infranetes_common import vmserver as messages
from vmserver.stats.cgroup import flat, pressure

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
# What carries the pod's own traffic is a network card; these carry what stays in the machine.
_INNER = ("lo", "docker", "veth", "br-", "dummy", "ifb")
MAX_CARDS = 64
_TICK_NANOS = 10**9 // os.sysconf("SC_CLK_TCK")


def read(names: Sequence[str] = FILES, proc: Path = Path("/proc")) -> dict[str, str]:
    """Those of the files that there are, by name."""
    found = {}
    for name in names:
        try:
            found[name] = (proc / name).read_text(errors="replace")
        except OSError:
            continue
    return found


def usage(files: Mapping[str, str]) -> Any:
    """The machine's Usage. Its processes are left to whoever knows which are the pod's."""
    result = messages.Usage(time_nanos=time.time_ns())
    _cpu(result.cpu, files.get("stat", ""))
    _memory(result.memory, files)
    for kind in ("cpu", "memory", "io"):
        found = pressure(files.get(f"pressure/{kind}", ""))
        if found is not None:
            getattr(result, f"{kind}_pressure").CopyFrom(found)
    return result


def _cpu(cpu: Any, stat: str) -> None:
    line = stat.partition("\n")[0].split()
    if len(line) < 8 or line[0] != "cpu":
        return
    user, nice, system, _idle, _wait, irq, softirq = (int(word) for word in line[1:8])
    cpu.user_nanos = (user + nice) * _TICK_NANOS
    cpu.system_nanos = (system + irq + softirq) * _TICK_NANOS
    cpu.total_nanos = cpu.user_nanos + cpu.system_nanos


def _memory(memory: Any, files: Mapping[str, str]) -> None:
    text = files.get("meminfo", "").replace(" kB", "").replace(":", "")
    sizes = flat("\n".join(" ".join(line.split()) for line in text.splitlines()))
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


def cards(files: Mapping[str, str]) -> list[Any]:
    """The NetworkCards, that with the default route first."""
    found = []
    for line in files.get("net/dev", "").splitlines()[2:]:
        name, colon, rest = line.partition(":")
        name, words = name.strip(), rest.split()
        if not colon or name.startswith(_INNER) or len(words) < 12:
            continue
        counts = [int(word) for word in words]
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
    return sorted(found[:MAX_CARDS], key=lambda card: card.name != default)


def _default(routes: str) -> str:
    """The card whose IPv4 route leads everywhere; "": none."""
    for line in routes.splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[1] == words[7] == "00000000":
            return words[0]
    return ""
