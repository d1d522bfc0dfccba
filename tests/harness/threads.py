# SPDX-License-Identifier: Apache-2.0
"""What the kernel knows about a thread: how long it waited for a processor, and whether it sleeps."""

from __future__ import annotations

import os
import platform
import threading
from pathlib import Path

FUTEX = {"x86_64": b"202", "aarch64": b"98"}[platform.machine()]
"""The number of futex(2), in which threads that wait for the GIL sleep."""


class ThreadStatus:
    """Reads, from any thread, the status of the thread that made this object.

    Sources: `schedstat` (Linux' Documentation/scheduler/sched-stats), `syscall` and `stat` (proc(5)).
    """

    def __init__(self) -> None:
        task = Path(f"/proc/self/task/{threading.get_native_id()}")
        self._schedstat = os.open(task / "schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._syscall = os.open(task / "syscall", os.O_RDONLY | os.O_CLOEXEC)
        self._stat = os.open(task / "stat", os.O_RDONLY | os.O_CLOEXEC)

    def waited(self) -> int:
        """Return the total nanoseconds for which it was ready to run while others had the processors."""
        return int(os.pread(self._schedstat, 64, 0).split()[1])

    def processor(self) -> int:
        """Return the number of the processor that it runs on, or ran on last."""
        return int(os.pread(self._stat, 1024, 0).rpartition(b")")[2].split()[36])

    def sleeps(self) -> bool:
        """Return whether it sleeps in a system call other than futex(2).

        In futex(2), a lock of the program can't be told from the GIL, which threads wait for all the time.
        """
        fields = os.pread(self._syscall, 256, 0).split()
        return bool(fields) and fields[0].isdigit() and fields[0] != FUTEX
