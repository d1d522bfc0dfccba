# SPDX-License-Identifier: Apache-2.0
"""Samples the stack of a thread whose callback takes long, and whether the thread sleeps.

It uses faulthandler, which walks the frames in C and holds the GIL meanwhile. Following `frame.f_back` of
another, running thread from Python is known to crash CPython 3.11.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections import Counter, deque

import attrs

from tests.harness.threads import ThreadStatus

INTERVAL = 0.02  # seconds between two samples
INTERVAL_NANOS = 20_000_000
MAX_CALLS = 14
_STARTING = ("in _execute_child", "in _posix_spawn")
"""The calls of subprocess.Popen and `infranetes_common.spawning` that wait until the kernel executes the
program: a tenth of a millisecond, or longer if others have the processors. os.posix_spawn, which keeps the
GIL meanwhile, is never seen at it."""


@attrs.frozen
class Sample:
    """A stack, the latest call last, and whether the thread slept in a system call."""

    stack: str = ""
    asleep: bool = False


class Stacks:
    """Samples the stack of the thread that makes this object, every 20 ms while `began` is set.

    :ivar began: time.perf_counter_ns() at the start of the running callback; 0: none runs.
    """

    def __init__(self) -> None:
        self.began = 0
        self.thread = ThreadStatus()
        self._head = f"hread 0x{threading.get_ident():016x} "  # "Thread", and "Current thread"
        self._samples: deque[tuple[int, Sample]] = deque(maxlen=100)
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="tests.stacks", daemon=True)

    def start(self) -> None:
        """Begin sampling."""
        self._watcher.start()

    def stop(self) -> None:
        """End sampling."""
        self._stopped.set()
        self._watcher.join()

    def typical(self, began: int) -> Sample:
        """Return the commonest stack of the callback that began then, and whether it was ever seen asleep."""
        samples = [sample for at, sample in self._samples.copy() if at == began]  # the watcher adds some
        if not samples:
            return Sample()
        asleep = [sample for sample in samples if sample.asleep]
        ((stack, _times),) = Counter(sample.stack for sample in asleep or samples).most_common(1)
        return Sample(stack, bool(asleep))

    def _watch(self) -> None:
        file = os.memfd_create("stacks", os.MFD_CLOEXEC)
        while not self._stopped.wait(INTERVAL):
            began = self.began
            if began and time.perf_counter_ns() - began > INTERVAL_NANOS:
                asleep = self.thread.sleeps()
                os.ftruncate(file, 0)
                os.lseek(file, 0, os.SEEK_SET)
                faulthandler.dump_traceback(file, all_threads=True)
                text = os.pread(file, 1 << 20, 0).decode(errors="replace")
                calls = text.partition(self._head)[2].partition("\n\n")[0].splitlines()[1:]
                calls = calls[: next((n for n, call in enumerate(calls) if "in _measure" in call), MAX_CALLS)]
                asleep = asleep and not any(each in call for each in _STARTING for call in calls[:1])
                self._samples.append((began, Sample("\n".join(reversed(calls[:MAX_CALLS])), asleep)))
        os.close(file)
