# SPDX-License-Identifier: Apache-2.0
"""How fast this machine computes, beside the one on which limits in milliseconds were set."""

from __future__ import annotations

import time

REFERENCE_MS = 10.5
"""What `_work` takes on that machine: CPython 3.11 on one processor of a cloud's, of 2.5 GHz."""
ROUNDS = 15


def _work() -> int:
    """Do what Python programs spend their time on: calls, attributes, dictionaries, small strings."""
    counted: dict[str, int] = {}
    for number in range(60_000):
        key = f"{number % 97:x}"
        counted[key] = counted.get(key, 0) + len(key)
    return len(counted)


def slowness() -> float:
    """Return by what factor this machine is slower than the reference, at least 1.

    It is measured in this thread's processor time, so that a busy machine is not taken for a slow one.
    """
    taken = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        _work()
        taken.append(time.thread_time() - began)
    return max(1.0, min(taken) * 1000 / REFERENCE_MS)
