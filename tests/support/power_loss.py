# SPDX-License-Identifier: Apache-2.0
"""A volume's file that forgets, when its power is lost, whatever was not flushed.

nbdkit keeps what is written apart from what is flushed (`volatile_disk`), and nbdfuse serves that at the
file's path, so that whoever opens it has a file like any other. When the power is lost both are killed,
before the disk's users are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.harness.tools import need
from tests.support import volatile_disk

_START_SECONDS = 30.0


class VolatileFile:
    """A file while it is served. It is what it was before, until `lose_power`.

    :param path: where it is, and where it is served.
    :param work: a directory for what is written meanwhile.
    :ivar flushes: how often it was flushed, once the power is lost.
    """

    def __init__(self, path: Path, work: Path) -> None:
        self.path = path.absolute()
        self.flushes = 0
        self._work = work
        stable, volatile, flushes = work / "stable", work / "volatile", work / "flushes"
        work.mkdir()
        os.link(path, stable)  # reached by no other name while it is served
        subprocess.run(["cp", "--sparse=always", path, volatile], check=True)
        flushes.touch()
        plugin = [f"script={volatile_disk.__file__}", f"stable={stable}", f"volatile={volatile}"]
        self._processes: list[subprocess.Popen[bytes]] = []
        with tempfile.TemporaryDirectory() as directory:  # a socket's path can't be long
            socket = Path(directory) / "nbd"
            self._start(need("nbdkit"), "-f", f"--unix={socket}", "python", *plugin, f"flushes={flushes}")
            self._wait(socket.exists)
            self._start(need("nbdfuse"), "-o", "allow_other", str(self.path), "--unix", str(socket))
            self._wait(lambda: os.path.ismount(path))

    def _start(self, *command: str) -> None:
        self._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))

    def _wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not until():
            if self._processes[-1].poll() is not None or time.monotonic() > deadline:
                self.end()
                raise RuntimeError("nbdkit and nbdfuse do not serve the file")
            time.sleep(0.02)

    def fail(self) -> None:
        """Have the power lost: every access fails from now on. Idempotent."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()

    def lose_power(self) -> None:
        """Have the file as it is after a loss of power. Its users have ended."""
        self.fail()
        subprocess.run(["umount", self.path], check=True)
        self.flushes = (self._work / "flushes").stat().st_size
        shutil.rmtree(self._work)

    def end(self) -> None:
        """Serve it no more, whatever becomes of what is in it. Idempotent."""
        self.fail()
        subprocess.run(["umount", "-l", self.path], check=False, stderr=subprocess.DEVNULL)
