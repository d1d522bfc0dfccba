# SPDX-License-Identifier: Apache-2.0
"""The conmon of an agent that was killed in the moment in which it started it.

It is not in its cgroup yet and has written down nothing, and it goes on by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_ROUNDS = 100
_QUIET = 8  # rounds without one: what forks or executes in this moment is not seen, nor what will be a conmon
_PAUSE_SECONDS = 0.02


def kill_strays(id: str) -> None:
    """SIGKILL every conmon of a container, and what crun they have. Blocks: reads what all processes are."""
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
    conmon, crun = f"--cid={id}".encode(), {b"create", id.encode()}
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                words = set(Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0"))
                if conmon in words or (crun <= words and b"--bundle" in words):
                    found.append(int(entry))
    return found
