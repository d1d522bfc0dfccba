# SPDX-License-Identifier: Apache-2.0
"""Containers that the kernel killed because they were out of memory, according to the kernel's log.

Docker learns of the kill and of the container's end from different sources, and misses the kill if the end
comes first. The kernel's log names the container's cgroup.

Sources: Linux Documentation/ABI/testing/dev-kmsg; dump_oom_summary in Linux mm/oom_kill.c.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

from twisted.internet.interfaces import IReactorThreads

from infranetes_common.concurrency import run_in_thread
from vmserver.containers.docker.api import ContainerInspect

KMSG = Path("/dev/kmsg")
KILLED = 137  # the exit code of a process that SIGKILL ended
_RECORD = 8192  # bytes; the kernel's longest record
_VICTIM = re.compile(rb"oom-kill:[^\n]*task_memcg=[^,\n]*?([0-9a-f]{64})")


class KernelLog:
    """Reads the kernel's log from its oldest record on, when it is needed.

    :param path: /dev/kmsg, or a file in the same format. One that can't be read counts as empty."""

    def __init__(self, reactor: IReactorThreads, path: Path = KMSG) -> None:
        self._reactor = reactor
        self._path = path
        self._file: int | None = None
        self._killed: set[str] = set()
        self._lock = threading.Lock()  # held by the reading thread; the reactor never waits for it
        self._closed = False

    def close(self) -> None:
        """Close the log, now or when the thread that reads it is done. A later read opens it again."""
        self._closed = True
        self._close_unless_reading()

    async def corrected(self, container: ContainerInspect) -> ContainerInspect:
        """Return `container`, with `OOMKilled` set if the kernel's log says so."""
        if container["State"]["ExitCode"] != KILLED or container["State"]["OOMKilled"]:
            return container
        killed = await run_in_thread(self._reactor, self._thd_killed, container["Id"])
        corrected, state = container.copy(), container["State"].copy()
        state["OOMKilled"] = killed
        corrected["State"] = state
        return corrected

    def _thd_killed(self, id: str) -> bool:
        with self._lock:
            if id not in self._killed:
                try:
                    self._read()
                except OSError:  # there is no such log, or no permission to read it
                    self._close_file()
            killed = id in self._killed
        if self._closed:
            self._close_unless_reading()
        return killed

    def _close_unless_reading(self) -> None:
        if self._lock.acquire(blocking=False):  # otherwise the reading thread closes it
            try:
                self._close_file()
            finally:
                self._lock.release()

    def _read(self) -> None:
        """Read the messages that were logged since the last call."""
        if self._file is None:
            self._file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        while True:
            try:
                records = os.read(self._file, _RECORD)
            except BlockingIOError:
                return
            except BrokenPipeError:  # some records were overwritten before they were read
                continue
            if not records:
                return
            self._killed.update(id.decode() for id in _VICTIM.findall(records))

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
