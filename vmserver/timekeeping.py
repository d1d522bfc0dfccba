# SPDX-License-Identifier: Apache-2.0
"""Keeping the machine's clock right while it is a pod's.

The node reads the machine's clocks (Info) and says between which times of its own it did so (CorrectClock).
What it says is about a moment of the steady clock, so that it may be long on its way, or come twice.

========================================  ==============================================================
the clock                                 then
========================================  ==============================================================
is kept by a time service of the image    it is left alone
is right within `TOLERANCE_NANOS`         it runs at its own speed
is behind, by up to `STEP_NANOS`          it runs faster until it is right
is behind by more: the VM was suspended   it is set
is ahead                                  it runs slower until it is right: it never goes back
========================================  ==============================================================

Whether it is kept the kernel says, whatever is installed:

============================================  ====  ====================================================
a time service                                kept  who corrects the clock
============================================  ====  ====================================================
there is none                                 no    the node
has begun, and no server has answered yet     no    the node
has a server                                  yes   the service
lost its servers, or ended, in the last hour  yes   nobody: it goes on at the speed that was found right
lost its servers, or ended, before that       no    the node
sees that the clock was set                   no    the node, until the service has measured anew
============================================  ====  ====================================================

It runs up to a tenth faster or slower, which makes up for a second in ten. That is the kernel's: where an
agent is killed meanwhile, the next one ends it first, and the node sees what is still wrong. A service that
comes to keep the clock meanwhile gives it a speed of its own, which stays.
"""

from __future__ import annotations

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from infranetes_common.errors import FailedPrecondition, InvalidArgument
from vmserver.machine_clock import MachineClock, check_time
from vmserver.system_clock import MAX_SLEW_TICKS, TICKS, SystemClock

SECOND = 10**9
TOLERANCE_NANOS = SECOND // 100
STEP_NANOS = SECOND
SLEW_NANOS = 20 * SECOND  # what is less than two seconds wrong is right after this time
_OLDEST_NANOS = 60 * SECOND  # of a reading, until the node says what it was
_WIDEST_NANOS = 60 * SECOND  # between the two times that the node says

_log = Logger()


class Timekeeping:
    """Corrects the clock as the table above says. Times are nanoseconds."""

    def __init__(self, reactor: IReactorTime, system: SystemClock) -> None:
        self._reactor = reactor
        self._system = system
        self._clock = MachineClock(system)
        self._slew: IDelayedCall | None = None  # its end
        self._speed = TICKS  # that it has

    def begin(self) -> None:
        """End what an agent that was killed has begun. Idempotent."""
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
        """The steady clock, for `correct`; 0: the clock is not the node's to correct."""
        try:
            return 0 if self._system.kept_by_others() else self._system.steady()
        except OSError:
            return 0

    def correct(self, steady: int, earliest: int, latest: int) -> None:
        """Have the clock become right. Idempotent.

        :param steady: what `reading` was when it was neither before `earliest` nor after `latest`.
        :raise InvalidArgument: such times can't be.
        :raise FailedPrecondition: that was long ago, or the kernel refuses.
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
        """:raise OSError: the kernel refuses."""
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
        # In seconds of the clock that is slewed, by which reactors count.
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
