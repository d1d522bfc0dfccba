# SPDX-License-Identifier: Apache-2.0
"""The processor time that single turns of a reactor take."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

from twisted.internet.task import LoopingCall


class Turns:
    """The processor time that single turns of a reactor take, in seconds.

    :ivar longest: the longest turn, without garbage collections. :ivar collection: the longest of these.
    """

    def __init__(self, reactor: Any) -> None:  # Any: reactors have no interface for one turn
        self._reactor = reactor
        self.longest = self.collection = 0.0
        self._turn = reactor.doIteration
        self._began = self._collected = self._collection_began = 0.0

    def __enter__(self) -> Turns:
        self.longest = self.collection = self._collected = 0.0
        self._began = time.thread_time()
        gc.callbacks.append(self._collects)
        self._reactor.doIteration = self._iterate
        return self

    def __exit__(self, *_: object) -> None:
        self._reactor.doIteration = self._turn
        gc.callbacks.remove(self._collects)

    def _iterate(self, seconds: float) -> None:
        self._turn(seconds)
        now = time.thread_time()
        self.longest = max(self.longest, now - self._began - self._collected)
        self._began, self._collected = now, 0.0

    def _collects(self, phase: str, _: object) -> None:
        if phase == "start":
            self._collection_began = time.thread_time()
        elif self._collection_began:
            took = time.thread_time() - self._collection_began
            self._collected += took
            self.collection = max(self.collection, took)


def record(path: str) -> None:
    """Write the longest turn and collection of this process' reactor to a file, a line for each second."""
    from twisted.internet import reactor

    turns = Turns(reactor)

    def write() -> None:
        with Path(path).open("a") as file:
            file.write(f"{turns.longest} {turns.collection}\n")
        turns.longest = turns.collection = 0.0

    turns.__enter__()
    LoopingCall(write).start(1.0)


def longest(lines: str) -> tuple[float, float]:
    """Return the longest turn and the longest collection in some of these lines, in seconds."""
    found = [[float(each) for each in line.split()] for line in lines.splitlines()]
    return max(each[0] for each in found), max(each[1] for each in found)
