# SPDX-License-Identifier: Apache-2.0
"""A twistd whose reactor writes to the file that WATCHED names: two doubles.

The first is the length of its longest turn, the second the longest time from a call's begin to its answer,
for the calls in MEASURED. Both are processor time of the reactor's thread in seconds, spent on whatever it
was, so the machine's load does not change them. CONSTANTS has values of constants, as the first argument of
`tests.infranetes.daemon.constants` has.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from typing import Any

from twisted.internet import reactor as _reactor
from twisted.scripts.twistd import run

from tests.infranetes.daemon.constants import change
from txgrpc import Server
from txgrpc.service import Answer, Method

reactor: Any = _reactor  # Any: runUntilCurrent is in no interface
FORMAT = "dd"
MEASURED = ("PodSandboxStatus", "ListContainers")  # answered from what the daemon knows


class Watch:
    """Keeps the highest figures in a file of 16 bytes."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._shown = mmap.mmap(file.fileno(), struct.calcsize(FORMAT))
        self._last = time.thread_time()

    def note(self, turn: float, call: float) -> None:
        """Write these down if they are higher."""
        longest_turn, longest_call = struct.unpack(FORMAT, self._shown)
        if turn > longest_turn or call > longest_call:
            self._shown[:] = struct.pack(FORMAT, max(turn, longest_turn), max(call, longest_call))

    def turn(self) -> None:
        """Measure the turn that ends here."""
        now = time.thread_time()
        self.note(now - self._last, 0.0)
        self._last = now

    def measured(self, answer: Answer) -> Answer:
        """Return a function that answers like `answer`, and is measured."""

        async def answered(request: Any, call: Any) -> Any:  # Any: as in Answer
            began = time.thread_time()
            try:
                return await answer(request, call)
            finally:
                if request.DESCRIPTOR.name != "ListContainersRequest" or request.filter.pod_sandbox_id:
                    self.note(0.0, time.thread_time() - began)

        return answered


def watch(path: str) -> None:
    """Measure turns and calls from now on."""
    watch = Watch(path)
    run_until_current, find = reactor.runUntilCurrent, Server.find

    def turn() -> None:
        watch.turn()
        run_until_current()

    def find_measured(self: Server, path: bytes) -> tuple[Method, Answer]:
        method, answer = find(self, path)
        return method, watch.measured(answer) if method.name in MEASURED else answer

    reactor.runUntilCurrent = turn
    setattr(Server, "find", find_measured)  # noqa: B010 - a method


if __name__ == "__main__":
    watch(os.environ["WATCHED"])
    change(json.loads(os.environ["CONSTANTS"]))
    run()
