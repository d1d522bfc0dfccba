# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.cluster.systemctl NAME stop|start|show PROGRAM`: systemctl(1) for programs of a cluster.

NAME is the cluster's. `show` only prints whether the program is active, whatever properties are asked for."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.cluster.paths import Paths

SECONDS = 30.0  # within which kubelet has to end, or run again


class Unit:
    """A program that the supervisor starts again when it ends."""

    def __init__(self, paths: Paths, name: str) -> None:
        self._pid = paths.pid(name)
        self._stopped = paths.stopped(name)

    @property
    def active(self) -> bool:
        """Return whether it runs; a zombie does not."""
        stat = Path(f"/proc/{int(self._pid.read_text())}/stat")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
        return False

    def stop(self) -> None:
        """End it, and keep it from being started again. Idempotent. :raise TimeoutError: it still runs."""
        self._stopped.touch()
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(self._pid.read_text()), signal.SIGTERM)
        _until(lambda: not self.active, f"{self._pid.stem} has ended")

    def start(self) -> None:
        """Let the supervisor start it. Idempotent. :raise TimeoutError: it does not."""
        self._stopped.unlink(missing_ok=True)
        _until(lambda: self.active, f"{self._pid.stem} is there")


def _until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not in {SECONDS:.0f} s: {what}")
        time.sleep(0.1)


def main(arguments: Sequence[str]) -> int:
    """Run the program, and return its exit code."""
    match arguments:
        case [cluster, "stop", name]:
            Unit(Paths(cluster), name).stop()
        case [cluster, "start", name]:
            Unit(Paths(cluster), name).start()
        case [cluster, "show", name, *_]:
            print("active" if Unit(Paths(cluster), name).active else "inactive")
        case _:
            print(f"this systemctl stops, starts and shows, not: {' '.join(arguments[1:])}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
