# SPDX-License-Identifier: Apache-2.0
"""The memory that a call takes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable


def peak(call: Callable[[], object]) -> int:
    """Return the most bytes that Python had at a time during a call, beyond those from before."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
