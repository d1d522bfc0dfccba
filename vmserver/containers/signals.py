"""The CRI's signals, by the names and numbers of Linux."""

from __future__ import annotations

import signal

from infranetes_common import cri
from infranetes_common.errors import InvalidArgument


def signal_name(value: int) -> str:
    """SIGTERM, SIGRTMIN+3, ... for a value of the CRI's enum `Signal` other than RUNTIME_DEFAULT.

    :raise InvalidArgument: there is none.
    """
    try:
        name: str = cri.Signal.Name(value)
    except ValueError:
        raise InvalidArgument(f"config.stop_signal {value}: no such signal") from None
    return name.replace("PLUS", "+").replace("MINUS", "-")


def signal_number(value: int) -> int:
    """The same as Linux numbers it. :raise InvalidArgument: there is none."""
    name = signal_name(value)
    base = next((edge for edge in ("SIGRTMIN", "SIGRTMAX") if name.startswith(edge)), name)
    try:
        return int(signal.Signals[base]) + int(name.removeprefix(base) or 0)
    except (KeyError, ValueError):
        raise InvalidArgument(f"config.stop_signal: this machine has no {name}") from None
