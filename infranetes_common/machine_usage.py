# SPDX-License-Identifier: Apache-2.0
"""Resource usage of a whole Linux, from the text of files of proc(5), which may be anything at all.

Both daemons read them: the agent those of its machine, the node those of a guest without agent. Their formats
are in Linux' Documentation/filesystems/proc.rst and Documentation/accounting/psi.rst.
"""

from __future__ import annotations

from collections.abc import Mapping

from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages

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
_TICK_NANOS = 10**9 // 100  # of proc(5)'s times: USER_HZ, which is 100 wherever Linux runs today
MAX_FILE = 1024 * 1024  # the most bytes that are looked at of one file
MAX_LINES = 4096  # the most of them that are looked at
MAX_WORDS = 16  # the most of a line of pairs that are looked at
MAX_NUMBER = 2**53  # microseconds: 285 years of processor; bytes: 8 PiB
_MAX_TICKS = MAX_NUMBER // 10**5
_MAX_KILOBYTES = MAX_NUMBER // 1024


def usage(files: Mapping[str, str], time_nanos: int) -> messages.Usage:
    """Parse those of `FILES` that there are. The numbers of processes and threads are left to the caller."""
    result = messages.Usage(time_nanos=time_nanos)
    _cpu(result.cpu, files.get("stat", ""))
    _memory(result.memory, files)
    for kind in ("cpu", "memory", "io"):
        found = pressure(files.get(f"pressure/{kind}", ""))
        if found is not None:
            getattr(result, f"{kind}_pressure").CopyFrom(found)
    return result


def _cpu(cpu: messages.Cpu, stat: str) -> None:
    line = stat.partition("\n")[0].split(None, 8)
    if len(line) < 8 or line[0] != "cpu":
        return
    user, nice, system, _idle, _wait, irq, softirq = (min(number(word), _MAX_TICKS) for word in line[1:8])
    cpu.user_nanos = (user + nice) * _TICK_NANOS
    cpu.system_nanos = (system + irq + softirq) * _TICK_NANOS
    cpu.total_nanos = cpu.user_nanos + cpu.system_nanos


def _memory(memory: messages.Memory, files: Mapping[str, str]) -> None:
    text = files.get("meminfo", "").replace(" kB", "").replace(":", "")
    sizes = flat("\n".join(" ".join(line.split(None, 3)[:3]) for line in first_lines(text)))
    events = flat(files.get("vmstat", ""))

    def size(name: str) -> int:
        return min(sizes.get(name, 0), _MAX_KILOBYTES) * 1024

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
        counts = [number(word) for word in words[:12]]
        found.append(
            messages.NetworkCard(
                name=name[:64],
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
        words = line.split(None, 8)
        if len(words) > 7 and words[1] == words[7] == "00000000":
            return words[0]
    return ""


def first_lines(text: str, most: int = MAX_LINES) -> list[str]:
    """Return the first lines of a text: a container may have the kernel write many into some files."""
    return text.split("\n", most)[:most]


def flat(text: str) -> dict[str, int]:
    """Parse lines of the form ``NAME NUMBER``; others are ignored."""
    found = {}
    for line in first_lines(text):
        name, _, value = line.partition(" ")
        if value.strip().isdecimal():
            found[name] = number(value)
    return found


def number(text: str) -> int:
    """Parse a file that is one number; 0 for ``max`` and anything else."""
    text = text.strip()
    if not text.isdecimal():
        return 0
    return min(int(text), MAX_NUMBER) if len(text) < 20 else MAX_NUMBER


def pressure(text: str) -> cri.PsiStats | None:
    """Parse a PSI file, whose lines are ``some avg10=0.00 avg60=0.00 avg300=0.00 total=0`` and the same for
    ``full``; None if the kernel does not keep it."""
    result = cri.PsiStats()
    for line in first_lines(text, 2):
        kind, *pairs = line.split(None, MAX_WORDS)[:MAX_WORDS] or [""]
        found = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        try:
            data = cri.PsiData(
                Total=number(found["total"]),
                Avg10=_percent(found["avg10"]),
                Avg60=_percent(found["avg60"]),
                Avg300=_percent(found["avg300"]),
            )
        except (KeyError, ValueError):
            continue
        if kind == "some":
            result.Some.CopyFrom(data)
        elif kind == "full":
            result.Full.CopyFrom(data)
    return result if result.HasField("Some") or result.HasField("Full") else None


def _percent(text: str) -> float:
    """Parse an average. :raise ValueError: it is none."""
    value = float(text)
    if not 0 <= value <= 100:
        raise ValueError(text[:20])
    return value
