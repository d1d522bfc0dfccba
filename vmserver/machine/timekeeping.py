# SPDX-License-Identifier: Apache-2.0
"""Corrections of the machine's clock while the machine belongs to a pod.

The node reads the machine's clocks (Info) and then sends two times of its own clock, between which it has
read them (CorrectClock). The message refers to a reading of the steady clock, so it may arrive late or twice.

========================================  ==============================================================
the clock                                 then
========================================  ==============================================================
is kept by a time service of the image    it is left alone
is right within `TOLERANCE_NANOS`         it runs at its own speed
is behind, by up to `STEP_NANOS`          it runs faster until it is right
is behind by more: the VM was suspended   it is set
is ahead                                  it runs slower until it is right: it never goes back
========================================  ==============================================================

The kernel reports whether a time service keeps the clock, whichever service is installed:

============================================  ====  ====================================================
a time service                                kept  who corrects the clock
============================================  ====  ====================================================
there is none                                 no    the node
has begun, and no server has answered yet     no    the node
has a server                                  yes   the service
lost its servers, or ended, in the last hour  yes   nobody: the clock keeps the speed that it was given
lost its servers, or ended, before that       no    the node
sees that the clock was set                   no    the node, until the service has measured anew
============================================  ====  ====================================================

The clock runs up to a tenth faster or slower, which makes up for a second in ten. The speed is the kernel's:
if the agent is killed meanwhile, the next one resets it first, and the node finds out what is still wrong. A
time service that begins to keep the clock meanwhile sets a speed of its own, which stays.
"""

from __future__ import annotations

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from infranetes_common.errors import FailedPrecondition, InvalidArgument
from vmserver.machine.clock import MachineClock, check_time
from vmserver.machine.system_clock import MAX_SLEW_TICKS, TICKS, SystemClock

SECOND = 10**9
TOLERANCE_NANOS = SECOND // 100
STEP_NANOS = SECOND
SLEW_NANOS = 20 * SECOND  # a clock up to two seconds wrong is right after this time
_OLDEST_NANOS = 60 * SECOND  # the oldest reading of the clock that a correction may refer to
_WIDEST_NANOS = 60 * SECOND  # the longest interval between a correction's earliest and latest time

_log = Logger()


class Timekeeping:
    """Corrects the clock as the table above says. Times are nanoseconds."""

    def __init__(self, reactor: IReactorTime, system: SystemClock) -> None:
        self._reactor = reactor
        self._system = system
        self._clock = MachineClock(system)
        self._slew: IDelayedCall | None = None  # the timer that ends the slew under way
        self._speed = TICKS  # the speed that this agent has set

    def begin(self) -> None:
        """Reset the speed that a killed agent has left. Idempotent."""
        try:
            if self._slew is None and self._system.ticks() != TICKS and not self._system.kept_by_others():
                self._system.set_ticks(TICKS)
        except OSError as error:
            _log.warn("the speed of the machine's clock can't be set: {error}", error=error)

    def stop(self) -> None:
        """Let the clock run at its own speed. Idempotent."""
        if self._slew is not None:
            self._end_slew()

    def reading(self) -> int:
        """Return the steady clock, for `correct`; 0 if the node must not correct the clock."""
        try:
            return 0 if self._system.kept_by_others() else self._system.steady()
        except OSError:
            return 0

    def correct(self, steady: int, earliest: int, latest: int) -> None:
        """Begin to correct the clock. Idempotent.

        :param steady: the result of `reading` at a time between `earliest` and `latest`.
        :raise InvalidArgument: the times are impossible.
        :raise FailedPrecondition: the reading is too old, or the kernel refuses.
        """
        check_time(earliest, "earliest_nanos")
        check_time(latest, "latest_nanos")
        if not 0 <= latest - earliest <= _WIDEST_NANOS:
            raise InvalidArgument("latest_nanos: expected a time up to a minute after earliest_nanos")
        elapsed = self._system.steady() - steady
        if not 0 <= elapsed <= _OLDEST_NANOS:
            raise FailedPrecondition("the machine's clock was read more than a minute ago, or before a boot")
        try:
            if not self._system.kept_by_others():
                now = self._system.now()
                self._become(now, min(max(now, earliest + elapsed), latest + elapsed))
        except OSError as error:
            raise FailedPrecondition(
                f"the machine's clock can't be corrected: {error}; the agent has to run as root, with "
                "CAP_SYS_TIME"
            ) from error

    def _become(self, now: int, right: int) -> None:
        """Correct the clock, which is at `now`. :raise OSError: the kernel refuses."""
        missing = right - now
        if abs(missing) <= TOLERANCE_NANOS:
            self.stop()
        elif missing > STEP_NANOS:
            self.stop()
            self._clock.move_forward(right)
            _log.info("the machine's clock was {seconds:.3f} s behind: it is set", seconds=missing / SECOND)
        else:
            self._begin_slew(missing)

    def _begin_slew(self, missing: int) -> None:
        ticks = min(max(-(-abs(missing) * TICKS // SLEW_NANOS), 1), MAX_SLEW_TICKS)
        speed = TICKS + (ticks if missing > 0 else -ticks)
        self._system.set_ticks(speed)
        self._speed = speed
        if self._slew is not None and self._slew.active():
            self._slew.cancel()
        # In seconds of the slewed clock, since reactors count by it.
        self._slew = self._reactor.callLater(abs(missing) * speed / ticks / SECOND, self._end_slew)

    def _end_slew(self) -> None:
        slew, self._slew = self._slew, None
        if slew is not None and slew.active():
            slew.cancel()
        try:
            if self._system.ticks() == self._speed:
                self._system.set_ticks(TICKS)
        except OSError as error:
            _log.warn("the speed of the machine's clock can't be set: {error}", error=error)
