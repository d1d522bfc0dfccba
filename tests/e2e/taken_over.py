# SPDX-License-Identifier: Apache-2.0
"""What a QEMU that was taken over can do to other VMs, and to the files that they share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from infranetes.providers.qemu.vm import record
from tests.e2e.qemu_case import said

# Run as the attacker's user: it takes each descriptor out of its QEMU and opens each anew, to write through
# it, and looks for the victim's. It leaves out the files that are its own.
_ATTACK = """
import ctypes, json, mmap, os, sys

attacker, victim, own = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)
PIDFD_GETFD = 438
page = bytes([0x5A]) * 4096
written, reached, seen = [], [], 0

def attempt(name, descriptor):
    size = os.fstat(descriptor).st_size
    for offset in (0, size // 2 & ~4095, max(0, size - 4096) & ~4095):
        try:
            os.pwrite(descriptor, page, offset)
            written.append([name, "pwrite", offset])
        except OSError:
            pass
        try:
            with mmap.mmap(descriptor, 4096, mmap.MAP_SHARED, offset=offset) as shared:
                shared[:] = page
            written.append([name, "mmap", offset])
        except (OSError, ValueError):
            pass
    for shrink in (lambda: os.ftruncate(descriptor, 0), lambda: os.fchmod(descriptor, 0o666)):
        try:
            shrink()
            written.append([name, "changed"])
        except OSError:
            pass

pidfd = os.pidfd_open(attacker)
for number in os.listdir(f"/proc/{attacker}/fd"):
    path = f"/proc/{attacker}/fd/{number}"
    target = os.readlink(path)
    if not target.startswith(("/", "/memfd")) or target.startswith("/dev/") or target in own:
        continue
    seen += 1
    taken = libc.syscall(PIDFD_GETFD, pidfd, int(number), 0)
    assert taken >= 0, (path, os.strerror(ctypes.get_errno()))
    attempt(f"{number} {target}", taken)
    for flags in (os.O_RDWR, os.O_WRONLY):
        try:
            attempt(f"{path} {target} anew", os.open(path, flags))
        except OSError:
            pass
for what in ("fd", "mem", "maps", "environ", "cwd", "map_files"):
    try:
        path = f"/proc/{victim}/{what}"
        {"fd": os.listdir, "map_files": os.listdir, "cwd": os.readlink}.get(what, open)(path)
        reached.append(what)
    except OSError:
        pass
try:
    os.kill(victim, 0)
    reached.append("kill")
except OSError:
    pass
print(json.dumps({"descriptors": seen, "written": written, "reached": reached}))
"""
_OWN = (record.DISK, record.CONSOLE, record.OUTPUT)  # the files that a VM may write to


@attrs.frozen
class Tried:
    """The outcome of an attack."""

    descriptors: int  # of files that are not the attacker's alone
    written: list[Any]  # to what it could write, and how
    reached: list[str]  # of the victim's process


def attack(attacker: int, victim: int, directory: Path) -> Tried:
    """Do what the user of one VM's QEMU can to others.

    :param attacker: the process of its QEMU. :param victim: that of another.
    :param directory: of the attacker's files."""
    user = Path(f"/proc/{attacker}").stat().st_uid
    own = json.dumps([str(directory / name) for name in _OWN])
    become = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups")
    return Tried(
        **json.loads(said(*become, "/usr/bin/python3", "-IS", "-c", _ATTACK, str(attacker), str(victim), own))
    )


def states(files: Iterable[Path]) -> Mapping[Path, tuple[int, int]]:
    """Return the times of change and the sizes of files. That of an empty one says when it was used last."""
    found = {path: path.stat() for path in files}
    return {path: (stat.st_mtime_ns if stat.st_size else 0, stat.st_size) for path, stat in found.items()}
