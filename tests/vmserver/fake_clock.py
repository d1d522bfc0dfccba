# SPDX-License-Identifier: Apache-2.0
"""A machine's clocks, whose time a test controls."""

from __future__ import annotations

from vmserver.machine.system_clock import MAX_SLEW_TICKS, TICKS

SECOND = 10**9


class FakeClock:
    """A `SystemClock`.

    :param drift: how much too fast it runs, in seconds per second.
    :ivar settings: the times to which it was set. :ivar refuses: whether it can't be changed.
    """

    def __init__(self, nanos: int, drift: float = 0.0) -> None:
        self._drift = drift
        self.settings: list[int] = []
        self.refuses = False
        self.others_keep_it = False
        self._now = nanos
        self._steady = 7 * SECOND
        self._ticks = TICKS

    def pass_time(self, seconds: float) -> None:
        """Let so much time pass."""
        passed = seconds * SECOND * (1 + self._drift)
        self._steady += round(passed)
        self._now += round(passed * self._ticks / TICKS)

    def now(self) -> int:
        return self._now

    def set(self, nanos: int) -> None:
        self._change()
        self.settings.append(nanos)
        self._now = nanos

    def steady(self) -> int:
        return self._steady

    def ticks(self) -> int:
        return self._ticks

    def set_ticks(self, ticks: int) -> None:
        self._change()
        if abs(ticks - TICKS) > MAX_SLEW_TICKS:
            raise OSError(22, "Invalid argument")
        self._ticks = ticks

    def kept_by_others(self) -> bool:
        return self.others_keep_it

    def _change(self) -> None:
        if self.refuses:
            raise PermissionError(1, "Operation not permitted")
