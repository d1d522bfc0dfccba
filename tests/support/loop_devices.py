# SPDX-License-Identifier: Apache-2.0
"""Loop devices of a machine on which tests run in parallel.

A device that was ended exists until no process has it open, and another test may just be inspecting all
devices.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from infranetes_common.loop_devices import open_loop_device

SECONDS = 10.0


def end_loop_device(path: str) -> None:
    """End a loop device. Idempotent."""
    with contextlib.suppress(FileNotFoundError), open_loop_device(path) as device:
        device.end()


def left_of(devices: Callable[[], Sequence[str]]) -> Sequence[str]:
    """Wait until `devices` returns none, or other tests no longer hold any open; return what is left."""
    deadline = time.monotonic() + SECONDS
    while (found := devices()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found
