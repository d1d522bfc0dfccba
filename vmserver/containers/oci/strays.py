# SPDX-License-Identifier: Apache-2.0
"""Stray conmons and cruns, whose agent was killed at the moment that it started them.

Such a conmon is not in its cgroup yet. It has recorded nothing and continues by itself, as a crun does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_ROUNDS = 100
# Rounds without a stray: a single one misses processes that fork or execute at that moment, and those that
# are about to become a conmon.
_QUIET = 8
_PAUSE_SECONDS = 0.02


def kill_strays(id: str) -> None:
    """SIGKILL every conmon of a container, and its crun. Blocks: reads all processes' command lines."""
    quiet = 0
    for _ in range(_ROUNDS):
        found = _strays(id)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if found else quiet + 1
        if quiet == _QUIET:
            return
        time.sleep(_PAUSE_SECONDS)


def _strays(id: str) -> list[int]:
    conmon, calls = f"--cid={id}".encode(), {b"create", b"run"}
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                words = set(Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0"))
                if conmon in words or (id.encode() in words and b"--bundle" in words and calls & words):
                    found.append(int(entry))
    return found
