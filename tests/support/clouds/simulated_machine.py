# SPDX-License-Identifier: Apache-2.0
"""A machine whose agent is a process among others: identities are applied to files and to a clock of its own.

Like a cloud's, its clock is right when it boots. Where instances are machines of their own
(`instance_machines`), names and clock are the kernel's; only there is entropy added.
"""

from __future__ import annotations

import time
from pathlib import Path

from vmserver.identity.apply import IdentityApplier, write_if_changed
from vmserver.machine.clock import MachineClock
from vmserver.machine.system_clock import TICKS

SETTINGS = "clock-settings"  # has a line for each time that the clock was set, with the nanoseconds


class _Clock:
    """A `SystemClock` of this process."""

    def __init__(self, settings: Path) -> None:
        self._settings = settings
        self._ahead = 0

    def now(self) -> int:
        return time.time_ns() + self._ahead

    def set(self, nanos: int) -> None:
        with self._settings.open("a") as file:
            file.write(f"{nanos - self.now()}\n")
        self._ahead = nanos - time.time_ns()

    def steady(self) -> int:
        return time.monotonic_ns()

    def ticks(self) -> int:
        return TICKS

    def set_ticks(self, ticks: int) -> None:
        raise OSError("nothing keeps this clock")

    def kept_by_others(self) -> bool:
        return True


class SimulatedMachine(IdentityApplier):
    """Applies identities. :param etc: the directory used instead of /etc."""

    def __init__(self, etc: Path) -> None:
        super().__init__(etc, clock=MachineClock(_Clock(etc / SETTINGS)))

    def set_hostname(self, hostname: str) -> None:
        write_if_changed(self._etc / "hostname", f"{hostname}\n", 0o644)

    def _add_entropy(self, entropy: bytes) -> None:
        """Add none: the kernel is shared."""
