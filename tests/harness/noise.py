"""What others do to the reactor's thread while it seems to sleep or to compute.

- A hypervisor takes the processor away: the thread seems to compute (`steal` in proc(5)).
- A thread of this process that holds Python's lock waits for a processor that others have: the
  reactor's thread, which wants the lock, seems to sleep.

Both are read at every tick of the watcher, so what is known of a span of time begins up to a tick
before it: on the innocent side.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections import deque

import attrs

FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine())  # its number as a system call
NANOS_PER_JIFFY = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@attrs.frozen
class Disturbance:
    """Nanoseconds within a span of time."""

    stolen: int  # by the hypervisor, of all processors
    held_up: int  # in which the process's other threads waited for a processor


@attrs.frozen
class _Reading:
    at: int  # time.perf_counter_ns
    stolen: int
    waited: dict[int, int]  # nanoseconds by thread


class Noise:
    """Made in the reactor's thread, `tick`ed in another one."""

    def __init__(self) -> None:
        self._reactor = threading.get_native_id()
        self._readings: deque[_Reading] = deque(maxlen=3000)

    def tick(self) -> None:
        """Remember how things stand."""
        self._readings.append(self._read())

    def since(self, began: int) -> Disturbance:
        """What there was from `began` (`time.perf_counter_ns`) until now."""
        then = next((reading for reading in reversed(self._readings) if reading.at <= began), None)
        if then is None:
            return Disturbance(0, 0)
        now = self._read()
        held_up = sum(delay - then.waited.get(thread, delay) for thread, delay in now.waited.items())
        return Disturbance(now.stolen - then.stolen, held_up)

    def asleep(self) -> bool:
        """The reactor's thread sleeps, and not for a lock: on its own account, whoever else is slow."""
        with open(f"/proc/self/task/{self._reactor}/syscall", "rb") as syscall:
            call = syscall.read().split()[0].decode()
        return FUTEX is not None and call not in (FUTEX, "running")

    def _read(self) -> _Reading:
        at = time.perf_counter_ns()
        threads = map(int, os.listdir("/proc/self/task"))
        waited = {thread: run_delay(thread) for thread in threads if thread != self._reactor}
        return _Reading(at, stolen(), waited)


def run_delay(thread: int) -> int:
    """Nanoseconds that a thread of this process has waited for a processor; 0 once it is gone."""
    try:
        with open(f"/proc/self/task/{thread}/schedstat", "rb") as schedstat:
            return int(schedstat.read().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def stolen() -> int:
    """Nanoseconds that the hypervisor has taken from all processors."""
    with open("/proc/stat", "rb") as stat:
        fields = stat.readline().split()
    return int(fields[8]) * NANOS_PER_JIFFY if len(fields) > 8 else 0
