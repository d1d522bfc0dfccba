"""The kernel's own word for a container that it killed for want of memory.

Docker hears of such a kill and of the container's end from two sources, and says nothing of the first where
the second comes before it. The kernel's log names the container's cgroup.

Sources: Linux Documentation/ABI/testing/dev-kmsg; dump_oom_summary in Linux mm/oom_kill.c.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool

KMSG = Path("/dev/kmsg")
KILLED = 137  # the exit code of a process that SIGKILL ended
_RECORD = 8192  # bytes; no record is longer, and one that did not fit would be EINVAL
_VICTIM = re.compile(rb"oom-kill:[^\n]*task_memcg=[^,\n]*?([0-9a-f]{64})")


class KernelLog:
    """Follows the kernel's log from its oldest record on, whenever it is asked.

    :param path: dev-kmsg, or what reads like it. One that can't be opened or read knows of nothing."""

    def __init__(self, reactor: Any, path: Path = KMSG) -> None:
        self._reactor = reactor
        self._path = path
        self._file: int | None = None
        self._killed: set[str] = set()
        self._lock = threading.Lock()  # one thread reads at a time; the reactor's never waits for it
        self._closed = False

    def close(self) -> None:
        """Let go of the log, at once or when who reads it is done; asked again, it is read anew."""
        self._closed = True
        self._let_go()

    async def corrected(self, found: Any) -> Any:
        """ContainerInspect's JSON `found`, where the kernel knows better of `OOMKilled`."""
        state = found["State"]
        if state["ExitCode"] != KILLED or state["OOMKilled"]:
            return found
        pool = self._reactor.getThreadPool()
        reading: Deferred[bool] = deferToThreadPool(self._reactor, pool, self._names, found["Id"])
        return {**found, "State": {**state, "OOMKilled": await reading}}

    def _names(self, id: str) -> bool:
        with self._lock:
            if id not in self._killed:
                try:
                    self._read()
                except OSError:  # no such log, or none that we may read
                    self._close()
            known = id in self._killed
        if self._closed:
            self._let_go()
        return known

    def _let_go(self) -> None:
        if self._lock.acquire(blocking=False):  # else the one who has it lets go, after this
            try:
                self._close()
            finally:
                self._lock.release()

    def _read(self) -> None:
        """Take in what was logged since the last time."""
        if self._file is None:
            self._file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        while True:
            try:
                records = os.read(self._file, _RECORD)
            except BlockingIOError:
                return
            except BrokenPipeError:  # some were overwritten before they were read
                continue
            if not records:
                return
            self._killed.update(id.decode() for id in _VICTIM.findall(records))

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
