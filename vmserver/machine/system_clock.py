# SPDX-License-Identifier: Apache-2.0
"""The kernel's clocks, and the speed of the one that tells the time. Source: adjtimex(2), linux/timex.h."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Protocol

TICKS = 10_000  # microseconds by which a clock at its own speed advances every 10 ms
MAX_SLEW_TICKS = 1_000  # the kernel accepts a deviation of a tenth either way

_ADJ_TICK = 0x4000
STA_UNSYNC = 0x0040
# Microseconds. The kernel adds 500 us a second to a clock's maximum error until a time service updates it. A
# service without an update for more than an hour has lost its servers, or ended. During the longest pause of
# timesyncd the error grows to 1 s.
_MAX_ERROR = 2_000_000


class SystemClock(Protocol):
    """The machine's clocks. Times are nanoseconds."""

    def now(self) -> int:
        """Return the time since 1970 UTC."""

    def set(self, nanos: int) -> None:
        """Set the time. :raise OSError: the kernel refuses."""

    def steady(self) -> int:
        """Return a clock that is never set and whose speed is never changed."""

    def ticks(self) -> int:
        """Return the speed of `now`; its own is `TICKS`. :raise OSError: the kernel does not report it."""

    def set_ticks(self, ticks: int) -> None:
        """Set the speed of `now`. :raise OSError: the kernel refuses."""

    def kept_by_others(self) -> bool:
        """Return whether a time service of the image keeps `now`.

        It does if it has a server and told the kernel so lately.

        :raise OSError: the kernel does not report it."""


class Timex(ctypes.Structure):
    """The kernel's report on its clock: struct timex of a 64-bit kernel."""

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
        ("pulses", ctypes.c_long * 8),  # pulses per second (PPS), and the offset of TAI; not read here
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
    """Return whether the kernel's report shows that a time service keeps the clock; see `SystemClock`."""
    return not timex.status & STA_UNSYNC and timex.maxerror < _MAX_ERROR


class KernelClock:
    """The `SystemClock` of this machine."""

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
