# SPDX-License-Identifier: Apache-2.0
"""Finds what a test leaves behind: child processes, threads, listening sockets."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import threading
import time
from pathlib import Path

import attrs
from twisted.internet.process import reapAllProcesses

GRACE = 2.0  # seconds that a process, thread or listener has to end after the test
PAUSE = 0.02
POOL_THREADS = ("PoolThread-twisted.internet.reactor", "PoolThread-infranetes-", "tests.")


@attrs.frozen
class Holdings:
    """This process's children, other threads and listening sockets, each with a readable description."""

    children: dict[int, str]
    threads: dict[int, str]
    listeners: dict[int, str]

    def since(self, before: Holdings) -> Holdings:
        """Return what this has and `before` has not."""
        return Holdings(
            {key: text for key, text in self.children.items() if key not in before.children},
            {key: text for key, text in self.threads.items() if key not in before.threads},
            {key: text for key, text in self.listeners.items() if key not in before.listeners},
        )

    def describe(self) -> list[str]:
        """Return the description of each."""
        return [*self.children.values(), *self.threads.values(), *self.listeners.values()]


def children() -> dict[int, str]:
    """Return this process's children that have not ended, by process id."""
    found = {}
    own = str(os.getpid()).encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            # proc(5): pid (comm) state ppid ...; comm may hold any character, even parentheses
            state, parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:2]
            if parent == own and state != b"Z":
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                found[int(pid)] = f"process {pid} ({command.decode(errors='replace').strip()[:200]})"
    return found


def threads() -> dict[int, str]:
    """Return the threads other than this one, thread pools' and the harness's own."""
    return {
        thread.ident or 0: f"thread {thread.name}"
        for thread in threading.enumerate()
        if not thread.name.startswith(POOL_THREADS) and thread is not threading.current_thread()
    }


def listeners() -> dict[int, str]:
    """Return this process's listening sockets, by inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found[status.st_ino] = f"socket listening on {sock.getsockname()}"
    return found


def holdings() -> Holdings:
    """Return what this process has now."""
    return Holdings(children(), threads(), listeners())


def left_behind(before: Holdings) -> list[str]:
    """Describe what is new since `before` and does not end within `GRACE`.

    New child processes are killed, so that they do not disturb later tests.
    """
    until = time.monotonic() + GRACE
    while True:
        reapAllProcesses()
        new = holdings().since(before)
        found = new.describe()
        if not found or time.monotonic() > until:
            break
        time.sleep(PAUSE)
    for pid in new.children:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return found
