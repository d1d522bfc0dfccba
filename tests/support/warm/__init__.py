# SPDX-License-Identifier: Apache-2.0
"""Programs of ours that start at once: forked from a Python that has imported them already.

A daemon's imports take ten times as long as all else that it does in a test. So one process, `server`,
imports what the tests start, and forks for each program. What runs is the same code in an interpreter of its
own, with its own arguments, environment, directory and files; only it is no child of the test's process.

The tests of how a daemon starts don't use it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.warm import client

ROOT = Path(__file__).resolve().parents[3]
#: The arguments of Python that run twistd.
TWISTD = ("-c", "from twisted.scripts.twistd import run; run()")


@functools.cache
def address() -> str:
    """Return the server's socket. The first call starts it; it ends with this process."""
    directory = tempfile.mkdtemp(prefix="infranetes-warm-")
    atexit.register(shutil.rmtree, directory, True)
    path = f"{directory}/socket"
    life, ours = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(100)
        numbers = (listener.fileno(), life)
        # Not this process's child: it outlives the test that was the first to need it.
        command = ["setsid", "--fork", sys.executable, "-m", "tests.support.warm.server", *map(str, numbers)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        subprocess.run(command, check=True, cwd=ROOT, env=environment, pass_fds=numbers)
    os.close(life)
    atexit.register(os.close, ours)
    return path


@functools.cache
def wait_until_ready() -> None:
    """Wait until the server has imported everything, which takes long on a busy machine. Blocks."""
    with open(os.devnull, "wb") as null:
        Process(["-c", ""], null.fileno(), ROOT, os.environ).wait()


def command(*arguments: str) -> list[str]:
    """Return the command that runs `python *arguments`, for `subprocess` and its like; no terminals."""
    return [sys.executable, "-ISs", client.__file__, "attached", address(), *arguments]


def detached(*arguments: str) -> list[str]:
    """Return the command that starts `python *arguments` and ends: for what another program starts."""
    return [sys.executable, "-ISs", client.__file__, "detached", address(), *arguments]


class Process:
    """`python *arguments`, as `subprocess.Popen` shows it. Its standard input is empty.

    It is killed when this object is no more.

    :param output: the file descriptor of its standard output and error.
    """

    def __init__(
        self, arguments: Sequence[str], output: int, directory: Path, environment: Mapping[str, str]
    ) -> None:
        with open(os.devnull, "rb") as null:
            files = (null.fileno(), output, output)
            self._socket = client.ask(address(), arguments, files, str(directory), dict(environment), True)
        self._read = b""
        self.returncode: int | None = None

    def __del__(self) -> None:
        self._socket.close()

    @property
    def pid(self) -> int:
        """Its process id. Waits, the first time, until it exists."""
        while b"\n" not in self._read:
            self._receive()
        return int(self._read.split(b"\n")[0])

    def poll(self) -> int | None:
        """Return how it has ended, or None."""
        while self.returncode is None:
            try:
                self._receive(socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
        return self.returncode

    def wait(self) -> int:
        """Wait until it ends. Return how."""
        while self.returncode is None:
            self._receive()
        return self.returncode

    def _receive(self, flags: int = 0) -> None:
        read = self._socket.recv(100, flags)
        if not read:
            raise AssertionError("the server of warm programs has died; what it imports may be broken")
        self._read += read
        if self._read.count(b"\n") == 2:
            self.returncode = os.waitstatus_to_exitcode(int(self._read.split(b"\n")[1]))
            self._socket.close()

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # its server knows already, and tells it next
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)
