# SPDX-License-Identifier: Apache-2.0
"""Records when a processor of this machine stood still because the machine's own host was busy.

A virtual machine's processor may stop for tens of milliseconds at any point, for example until its host has
brought in a page of memory. The kernel counts that time as work of the thread that the processor was running.
Only steal, the time for which the host reports that others had the processor, is left out of threads' times.

So each processor has a watcher, with a priority above every program that is not real-time, which repeatedly
sleeps for a few milliseconds. When it wakes late, nothing ran there meanwhile. Run as a program, this module
is the watchers: ``stalls.py FILE`` writes to the shared FILE until its standard input is closed. They must
run as root; otherwise no stall is ever found.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "INFRANETES_TEST_STALLS"  # names the shared memory, for the processes that a test run starts
INTERVAL_NANOS = 4_000_000
LATE_NANOS = 5_000_000  # waking later than this is a stall
TICK_NANOS = 10_000_000  # the unit of steal in /proc/stat
WAKES_PER_LOOK = 25  # the number of wakes after which the steal is read again
READY = b"."
KEPT = 256  # the number of each processor's latest stalls that are kept
_FIELDS = 1 + 2 * KEPT  # the number of stalls so far, and the start and the length of each
SIZE = 8 * _FIELDS * (os.cpu_count() or 1)


class Stalls:
    """The stalls of this machine's processors.

    :param memory: the descriptor of the file that the watchers write to.
    """

    def __init__(self, memory: int) -> None:
        self._fields = memoryview(mmap.mmap(memory, SIZE, prot=mmap.PROT_READ)).cast("q")

    def nanoseconds(self, processor: int, began: int, ended: int) -> int:
        """Return how long a processor stood still between two times of `time.perf_counter_ns`."""
        first = processor * _FIELDS
        if not 0 <= first < len(self._fields):
            return 0
        total = 0
        for number in range(min(self._fields[first], KEPT)):
            start, length = self._fields[first + 1 + 2 * number : first + 3 + 2 * number]
            total += max(0, min(ended, start + length) - max(began, start))
        return total


def watch(environment: Mapping[str, str] = os.environ) -> Stalls:
    """Start watchers, which end with this process, unless the environment names some that already run."""
    if path := environment.get(VARIABLE):
        with contextlib.suppress(OSError), open(path, "rb") as shared:
            if os.fstat(shared.fileno()).st_size == SIZE:
                return Stalls(shared.fileno())
    # A file, and not only a descriptor: workers that are isolated, or started by sudo, open it by its name.
    descriptor, path = tempfile.mkstemp(prefix="infranetes-stalls-")
    atexit.register(Path(path).unlink, missing_ok=True)
    with open(descriptor, "rb") as shared:
        os.ftruncate(descriptor, SIZE)
        watchers = subprocess.Popen(
            [sys.executable, __file__, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert watchers.stdout is not None
        with watchers.stdout as ready:
            ready.read(len(os.sched_getaffinity(0)))
        _running.append(watchers)  # keeps their standard input open until this process ends
        os.environ[VARIABLE] = path
        return Stalls(shared.fileno())


_running: list[subprocess.Popen[bytes]] = []


# ---- the watchers: a program that uses only the standard library, so that it starts fast


def _steal(processor: int) -> int:
    for line in Path("/proc/stat").read_text().splitlines():
        fields = line.split()
        if fields[0] == f"cpu{processor}":
            return int(fields[8]) * TICK_NANOS
    return 0


def _watch(processor: int, fields: memoryview) -> None:
    """Record this processor's stalls, until the parent process has ended.

    :param fields: see `_FIELDS`."""
    parent = os.getppid()
    os.sched_setaffinity(0, {processor})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(os.sched_get_priority_max(os.SCHED_FIFO) // 2))
    os.write(1, READY)
    steal, wakes = _steal(processor), 0
    while os.getppid() == parent:
        due = time.perf_counter_ns() + INTERVAL_NANOS
        time.sleep(INTERVAL_NANOS / 1e9)
        late = time.perf_counter_ns() - due
        wakes += 1
        if late > LATE_NANOS:
            before, steal = steal, _steal(processor)
            # The kernel already leaves steal out of threads' times. If it were counted here too, as much of a
            # thread's own computing would go unnoticed.
            if (length := late - (steal - before)) > 0:
                number = fields[0] % KEPT
                fields[1 + 2 * number], fields[2 + 2 * number] = due, length
                fields[0] += 1
        elif wakes % WAKES_PER_LOOK == 0:
            steal = _steal(processor)


def main(path: str) -> None:
    """Watch every processor."""
    with open(path, "r+b") as shared:
        fields = memoryview(mmap.mmap(shared.fileno(), SIZE)).cast("q")
    children: list[int] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the test run that reads the stalls
    for processor in os.sched_getaffinity(0):
        child = os.fork()
        if child == 0:
            try:
                _watch(processor, fields[processor * _FIELDS : (processor + 1) * _FIELDS])
            except PermissionError:
                os.write(1, READY)  # `watch` waits for this, though this processor will not be watched
            os._exit(0)
        children.append(child)
    sys.stdin.buffer.read()
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
