# SPDX-License-Identifier: Apache-2.0
"""The CRI's signals as Linux names and numbers them."""

from __future__ import annotations

import signal

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri


def signal_name(value: int) -> str:
    """Return the name (SIGTERM, SIGRTMIN+3) for a value of the CRI's enum `Signal` except RUNTIME_DEFAULT.

    :raise InvalidArgument: there is no such signal.
    """
    try:
        name = cri.Signal.Name(value)
    except ValueError:
        raise InvalidArgument(f"config.stop_signal {value}: no such signal") from None
    return name.replace("PLUS", "+").replace("MINUS", "-")


def signal_number(value: int) -> int:
    """Return the number of the same signal. :raise InvalidArgument: there is no such signal."""
    name = signal_name(value)
    base = next((edge for edge in ("SIGRTMIN", "SIGRTMAX") if name.startswith(edge)), name)
    try:
        return int(signal.Signals[base]) + int(name.removeprefix(base) or 0)
    except (KeyError, ValueError):
        raise InvalidArgument(f"config.stop_signal: this VM has no {name}") from None
