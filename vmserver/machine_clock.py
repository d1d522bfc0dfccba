# SPDX-License-Identifier: Apache-2.0
"""The machine's clock, which tells the node's time and never goes back in a pod.

============================================  ====================  =======================================
who says the time                             a clock behind it     a clock ahead of it
============================================  ====================  =======================================
an identity sent just now (virtio-serial)     is set                is set: nothing runs here yet
an identity that was kept (cloud, file)       is set: it is later   stays: the machine has booted since, and
                                              than that at least    its RTC went on
a clock line, right after the identity        is set                stays
============================================  ====================  =======================================

From then on `timekeeping` keeps it right. Certificates hold meanwhile: that of the machine is checked by the
node's clock, and that of the node may be newer than this one (`identity.tls`). Only a machine that is ahead
by more than the node's certificate is valid for, a day at least, refuses the node.
"""

from __future__ import annotations

from infranetes_common.errors import InvalidArgument
from vmserver.system_clock import SystemClock

_MILLI = 10**6
SLACK_NANOS = 20 * _MILLI  # a clock that is set is this far off at least
_EARLIEST_NANOS = 1_577_836_800 * 10**9  # 2020: an earlier clock is a broken clock
_LATEST_NANOS = 2**62


def check_time(nanos: int, name: str = "clock") -> None:
    """Check that it is a time of today. :param name: for the message. :raise InvalidArgument: it is not."""
    if not _EARLIEST_NANOS <= nanos < _LATEST_NANOS:
        raise InvalidArgument(f"{name} {nanos}: that is no time of today")


class MachineClock:
    """Sets the clock as the table above says. Times are nanoseconds since 1970 UTC."""

    def __init__(self, system: SystemClock) -> None:
        self._system = system

    def set(self, nanos: int) -> None:
        """Set the clock of a machine in which nothing runs yet.

        :raise InvalidArgument: no time of today. :raise OSError: the machine refuses."""
        check_time(nanos)
        if abs(nanos - self._system.now()) > SLACK_NANOS:
            self._system.set(nanos)

    def move_forward(self, nanos: int) -> None:
        """Set the clock, unless it is later already. Idempotent. Fails as `set`."""
        check_time(nanos)
        if nanos - self._system.now() > SLACK_NANOS:
            self._system.set(nanos)
