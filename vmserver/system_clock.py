# SPDX-License-Identifier: Apache-2.0
"""The kernel's clocks, and how fast the one that tells the time runs. Source: adjtimex(2), linux/timex.h."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Protocol

TICKS = 10_000  # microseconds that the clock is moved on each 10 ms, where it runs at its own speed
MAX_SLEW_TICKS = 1_000  # the kernel takes a tenth more or less

_ADJ_TICK = 0x4000
STA_UNSYNC = 0x0040
# Microseconds. The kernel takes a clock to become 500 us more wrong each second until it is told anew. A time
# service that told nothing for an hour lost its servers, or ended; timesyncd's longest pause makes it 1 s.
_MAX_ERROR = 2_000_000


class SystemClock(Protocol):
    """The machine's clocks. Times are nanoseconds."""

    def now(self) -> int:
        """The time, since 1970 UTC."""

    def set(self, nanos: int) -> None:
        """Set the time. :raise OSError: the kernel refuses."""

    def steady(self) -> int:
        """A clock that is never set, and whose speed is not changed either."""

    def ticks(self) -> int:
        """How fast `now` runs, in `TICKS`. :raise OSError: the kernel does not say."""

    def set_ticks(self, ticks: int) -> None:
        """Have `now` run that fast. :raise OSError: the kernel refuses."""

    def kept_by_others(self) -> bool:
        """Whether a time service of the image keeps `now`: it has a server and told the kernel so lately.

        :raise OSError: the kernel does not say."""


class Timex(ctypes.Structure):
    """What the kernel says of its clock: struct timex of a 64-bit kernel."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("constant", ctypes.c_long),
        ("precision", ctypes.c_long),
        ("tolerance", ctypes.c_long),
        ("time", ctypes.c_long * 2),
        ("tick", ctypes.c_long),
        ("pulses", ctypes.c_long * 8),  # of a PPS signal, and the offset of TAI; nothing here reads them
        ("padding", ctypes.c_int * 12),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.adjtimex.argtypes = (ctypes.POINTER(Timex),)


def _adjtimex(timex: Timex) -> Timex:
    if _libc.adjtimex(ctypes.byref(timex)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "adjtimex")
    return timex


def kept(timex: Timex) -> bool:
    """Whether what the kernel says of its clock shows a time service that keeps it; see `SystemClock`."""
    return not timex.status & STA_UNSYNC and timex.maxerror < _MAX_ERROR


class KernelClock:
    """The `SystemClock` of the machine below."""

    def now(self) -> int:
        return time.time_ns()

    def set(self, nanos: int) -> None:
        time.clock_settime_ns(time.CLOCK_REALTIME, nanos)

    def steady(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)

    def ticks(self) -> int:
        return int(_adjtimex(Timex()).tick)

    def set_ticks(self, ticks: int) -> None:
        _adjtimex(Timex(modes=_ADJ_TICK, tick=ticks))

    def kept_by_others(self) -> bool:
        return kept(_adjtimex(Timex()))
