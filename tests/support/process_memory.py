# SPDX-License-Identifier: Apache-2.0
"""The memory that a QEMU process has to itself and that it shares, by purpose (proc(5), smaps)."""

from __future__ import annotations

import enum
import re
from pathlib import Path

import attrs

from infranetes.providers.qemu.program.process import pids_by_argument
from infranetes.providers.qemu.template import ram

_RANGE = re.compile(r"[0-9a-f]+-[0-9a-f]+ (?P<rights>\S+) \S+ \S+ \d+ *(?P<name>.*)")
_FIELD = re.compile(r"(?P<key>\w+): +(?P<kib>\d+) kB")
_FIELDS = {
    "Pss": "proportional",
    "Private_Clean": "private",
    "Private_Dirty": "private",
    "Shared_Clean": "shared",
    "Shared_Dirty": "shared",
    "Anonymous": "written",
}


class Kind(enum.Enum):
    """What a mapping is for."""

    GUEST = "the guest's memory"
    CODE = "translated code"
    HEAP = "heap, stacks and tables"
    PROGRAM = "QEMU and its libraries"


@attrs.define
class Memory:
    """Amounts in MiB.

    :ivar proportional: the proportional set size (PSS): of each shared page, the process's part.
    :ivar private: memory that no other process has.
    :ivar written: memory that the process has written to, so that no other process can ever share it.
    """

    proportional: float = 0.0
    private: float = 0.0
    shared: float = 0.0
    written: float = 0.0

    def __add__(self, other: Memory) -> Memory:
        pairs = zip(attrs.astuple(self), attrs.astuple(other), strict=True)
        return Memory(*(mine + others for mine, others in pairs))


def parse(smaps: str) -> dict[Kind, Memory]:
    """Sum up the text of a process's smaps."""
    found = {kind: Memory() for kind in Kind}
    memory = found[Kind.HEAP]
    for line in smaps.splitlines():
        if begin := _RANGE.fullmatch(line):
            memory = found[_kind(begin["rights"], begin["name"])]
        elif (field := _FIELD.fullmatch(line)) and (name := _FIELDS.get(field["key"])):
            setattr(memory, name, getattr(memory, name) + int(field["kib"]) / 1024)
    return found


def of_process(pid: int) -> dict[Kind, Memory]:
    """Return the memory that a process has now. :raise OSError: it is gone."""
    return parse(Path(f"/proc/{pid}/smaps").read_text())


def of_vms(state_dir: Path) -> list[dict[Kind, Memory]]:
    """Return what each VM of the daemon with this `state_dir` has now. :raise OSError: one has just gone."""
    return [of_process(pid) for pid in pids_of_vms(state_dir)]


def pids_of_vms(state_dir: Path) -> list[int]:
    """Return the ids of the QEMU processes of the daemon with this `state_dir`."""
    tokens = [each.name for each in (state_dir / "qemu" / "vms").iterdir()]
    found = pids_by_argument([f"guest=infranetes-{token}" for token in tokens])
    return [pid for pids in found.values() for pid in pids]


def total(memory: dict[Kind, Memory]) -> Memory:
    """Return the sum over all kinds."""
    return sum(memory.values(), Memory())


def _kind(rights: str, name: str) -> Kind:
    if ram.NAME in name:
        return Kind.GUEST
    if rights.startswith("rwx"):
        return Kind.CODE
    return Kind.PROGRAM if name.startswith("/") else Kind.HEAP
