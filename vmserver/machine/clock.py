# SPDX-License-Identifier: Apache-2.0
"""The machine's clock, which tells the node's time and never goes back in a pod.

============================================  ====================  =======================================
the time comes from                           a clock behind it     a clock ahead of it
============================================  ====================  =======================================
an identity sent just now (virtio-serial)     is set                is set: nothing runs here yet
an identity that was kept (cloud, file)       is set: it is at      stays: the machine has booted since, and
                                              least that late now   its RTC went on
a clock line, right after the identity        is set                stays
============================================  ====================  =======================================

From then on `timekeeping` keeps the clock right. Certificates are accepted even before: the node checks the
machine's by its own clock, and the machine accepts a certificate of the node that is not valid yet
(`identity.tls`). The machine refuses the node only if its clock is ahead by more than the time for which the
node's certificate is valid, at least a day.
"""

from __future__ import annotations

from infranetes_common.errors import InvalidArgument
from vmserver.machine.system_clock import SystemClock

_MILLI = 10**6
SLACK_NANOS = 20 * _MILLI  # a clock that is less wrong than this is not set
_EARLIEST_NANOS = 1_577_836_800 * 10**9  # 2020: a clock before that is broken
_LATEST_NANOS = 2**62


def check_time(nanos: int, name: str = "clock") -> None:
    """Check that a time is of our days. :param name: for the message. :raise InvalidArgument: it is not."""
    if not _EARLIEST_NANOS <= nanos < _LATEST_NANOS:
        raise InvalidArgument(f"{name} {nanos}: that time is out of range")


class MachineClock:
    """Sets the clock as the table above says. Times are nanoseconds since 1970 UTC."""

    def __init__(self, system: SystemClock) -> None:
        self._system = system

    def set(self, nanos: int) -> None:
        """Set the clock of a machine in which nothing runs yet.

        :raise InvalidArgument: it is not a time of our days. :raise OSError: the machine refuses."""
        check_time(nanos)
        if abs(nanos - self._system.now()) > SLACK_NANOS:
            self._system.set(nanos)

    def move_forward(self, nanos: int) -> None:
        """Set the clock, unless it is later already. Idempotent. Raises as `set`."""
        check_time(nanos)
        if nanos - self._system.now() > SLACK_NANOS:
            self._system.set(nanos)
