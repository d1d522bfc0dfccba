# SPDX-License-Identifier: Apache-2.0
"""A volume's file that loses, when its power is lost, all data that was not flushed.

nbdkit keeps written data apart from flushed data (`volatile_disk`), and nbdfuse serves that at the file's
path, where it can be opened like any other file. When the power is lost, both are killed before the disk's
users.
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
from tests.support.disk_space import copy
from tests.support.waiting import listens

_START_SECONDS = 30.0


class VolatileFile:
    """A file that is served until `lose_power`, at first with the content that it had before.

    :param path: where the file is, and where it is served.
    :param work: a directory to be made, for what is written meanwhile.
    :ivar flushes: how often it was flushed; known once the power is lost.
    """

    def __init__(self, path: Path, work: Path) -> None:
        self.path = path.absolute()
        self.flushes = 0
        self._work = work
        stable, volatile, flushes = work / "stable", work / "volatile", work / "flushes"
        work.mkdir()
        os.link(path, stable)  # the only name that reaches the file while the mount covers `path`
        copy(path, volatile)
        flushes.touch()
        plugin = [f"script={volatile_disk.__file__}", f"stable={stable}", f"volatile={volatile}"]
        self._processes: list[subprocess.Popen[bytes]] = []
        with tempfile.TemporaryDirectory() as directory:  # a short path, as a socket needs one
            socket = Path(directory) / "nbd"
            self._start(need("nbdkit"), "-f", f"--unix={socket}", "python", *plugin, f"flushes={flushes}")
            self._wait(lambda: listens(socket))
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
        """Cut the power: every access fails from now on. Idempotent."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()

    def lose_power(self) -> None:
        """Cut the power, and put the file, as it is then, back in its place. Its users must have ended."""
        self.fail()
        subprocess.run(["umount", self.path], check=True)
        self.flushes = (self._work / "flushes").stat().st_size
        shutil.rmtree(self._work)

    def end(self) -> None:
        """Stop serving the file, without regard to its content. Idempotent."""
        self.fail()
        subprocess.run(["umount", "-l", self.path], check=False, stderr=subprocess.DEVNULL)
