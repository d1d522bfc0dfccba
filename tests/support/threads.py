# SPDX-License-Identifier: Apache-2.0
"""What runs in a thread, run at once instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def in_this_thread(reactor: object, work: Callable[[*Ts], T], *args: *Ts) -> T:
    """Do as `infranetes_common.concurrency.run_in_thread`, in the caller's thread and without a pause."""
    return work(*args)
