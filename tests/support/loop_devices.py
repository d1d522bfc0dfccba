# SPDX-License-Identifier: Apache-2.0
"""Loop devices of a machine on which tests run side by side.

A device that was ended is there until nobody has it open, and another test may look at all devices just now.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from infranetes_common.loop_devices import open_loop_device

SECONDS = 10.0


def end_loop_device(path: str) -> None:
    """Have a device end. Idempotent."""
    with contextlib.suppress(FileNotFoundError), open_loop_device(path) as device:
        device.end()


def left_of(devices: Callable[[], Sequence[str]]) -> Sequence[str]:
    """What `devices` still returns after as long as others may have ended devices open."""
    deadline = time.monotonic() + SECONDS
    while (found := devices()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found
