# SPDX-License-Identifier: Apache-2.0
"""Namespaces for a run of the benches: what it leaves behind ends with them, and runs don't collide."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

_NAMESPACES = ("unshare", "--mount", "--ipc", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
_INSIDE = "INFRANETES_BENCH_INSIDE"


def inside() -> bool:
    """Return whether this process has namespaces of its own, or can't have any."""
    return bool(os.environ.get(_INSIDE)) or os.geteuid() != 0


def go_inside(arguments: Sequence[str]) -> None:
    """Replace this process by `python -m bench` with these arguments, in new namespaces."""
    command = [*_NAMESPACES, sys.executable, "-m", "bench", *arguments]
    os.execvpe(command[0], command, {**os.environ, _INSIDE: "1"})  # noqa: S606


def settle_in() -> None:
    """Bring up the loopback interface, and fork so that the parent reaps orphaned processes."""
    if not os.environ.get(_INSIDE) or os.getpid() != 1:
        return
    child = os.fork()
    while child:
        ended, status = os.wait()
        if ended == child:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
