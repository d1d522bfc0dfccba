# SPDX-License-Identifier: Apache-2.0
"""A twistd whose reactor writes the length of its longest turn to the file that LONGEST_TURN names: a double.

The length is processor time of the reactor's thread in seconds, so the machine's load does not change it.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from typing import Any

from twisted.internet import reactor as _reactor
from twisted.scripts.twistd import run

reactor: Any = _reactor  # Any: runUntilCurrent is in no interface


def watch(path: str) -> None:
    """Measure turns from now on."""
    with open(path, "r+b") as file:
        shown = mmap.mmap(file.fileno(), 8)
    run_until_current = reactor.runUntilCurrent
    last = time.thread_time()

    def turn() -> None:
        nonlocal last
        now = time.thread_time()
        if now - last > struct.unpack("d", shown)[0]:
            shown[:] = struct.pack("d", now - last)
        last = now
        run_until_current()

    reactor.runUntilCurrent = turn


if __name__ == "__main__":
    watch(os.environ["LONGEST_TURN"])
    run()
