# SPDX-License-Identifier: Apache-2.0
"""The limits on calls to a cloud, and their suspension. No I/O: a clock is read, pauses are returned."""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs

_SLOWER = 0.7  # the rate is multiplied by this when the cloud throttles us
_SLOWEST = 0.1  # of the documented rate: the current one never falls below it
_RECOVERY = 0.2  # of the documented rate: how much the current rate recovers in a second


@attrs.define
class RateLimit:
    """A token bucket, as clouds count calls, which slows down while the cloud throttles us: others share it.

    :param now: seconds of a monotonic clock.
    :param rate: calls per second. :param burst: calls at once after a rest.
    :param chance: a number from 0 to 1, so that nodes that are throttled at the same time come back one by
        one.
    """

    now: Callable[[], float]
    rate: float
    burst: float
    chance: Callable[[], float] = random.random
    _current: float = attrs.field(init=False)
    _tokens: float = attrs.field(init=False)
    _at: float = attrs.field(init=False)
    _closed_until: float = 0.0

    def __attrs_post_init__(self) -> None:
        self._current, self._tokens, self._at = self.rate, self.burst, self.now()

    def wait(self, before: int = 0) -> float:
        """Seconds until a call may be made, after `before` others."""
        self._refill()
        missing = 1.0 + before - self._tokens
        # A remainder from rounding would be a wait too short for any clock.
        wait = missing / self._current if missing > 1e-6 else 0.0
        return max(wait, self._closed_until - self._at, 0.0)

    def take(self) -> None:
        """Count a call that is made now."""
        self._refill()
        self._tokens -= 1.0

    def throttled(self, retry_after: float) -> None:
        """Slow down after the cloud throttled a call, and make none for `retry_after` seconds or a moment."""
        self._refill()
        self._current = max(self._current * _SLOWER, self.rate * _SLOWEST)
        self._tokens = min(self._tokens, 0.0)
        pause = max(retry_after, (0.5 + self.chance()) / self._current)
        self._closed_until = max(self._closed_until, self._at + pause)

    def _refill(self) -> None:
        now = self.now()
        # Nothing is saved up during a pause: after it, calls are let through one by one.
        open_since = max(self._at, min(self._closed_until, now))
        past, self._at = now - self._at, now
        self._tokens = min(self.burst, self._tokens + (now - open_since) * self._current)
        self._current = min(self.rate, self._current + past * self.rate * _RECOVERY)

    @property
    def current(self) -> float:
        """The current rate, in calls per second."""
        self._refill()
        return self._current


@attrs.define
class CircuitBreaker:
    """Opens after several failures in a row, then lets single calls probe until one succeeds.

    state      left when                      next
    closed     `threshold` failures in a row  open
    open       its pause is over              half-open: one call probes
    half-open  the probe succeeds             closed
    half-open  the probe fails                open, for twice as long

    :ivar why: the reason of the last failure, for people.
    """

    now: Callable[[], float]
    threshold: int = 5
    first: float = 5.0  # seconds
    longest: float = 120.0
    why: str = ""
    _failures: int = 0
    _pause: float = 0.0
    _open_until: float | None = None
    _probing: bool = False

    def wait(self) -> float:
        """Seconds until a call may be made. 0: now; if a probe is due, this call is it."""
        if self._open_until is None:
            return 0.0
        left = self._open_until - self.now()
        if left > 0:
            return left
        if self._probing:
            return self._pause
        self._probing = True
        return 0.0

    def succeeded(self) -> None:
        """The cloud answered, possibly with a refusal."""
        self._failures, self._pause, self._open_until, self._probing = 0, 0.0, None, False

    def failed(self, why: str = "") -> None:
        """The cloud did not answer, answered that it is unavailable, or could not be called."""
        self._failures += 1
        self.why = why
        if self._probing or (self._open_until is None and self._failures >= self.threshold):
            self._pause = min(self._pause * 2, self.longest) if self._pause else self.first
            self._open_until = self.now() + self._pause
            self._probing = False

    def abandoned(self) -> None:
        """The call that `wait` allowed was not made, or its outcome is unknown."""
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether calls are held back."""
        return self._open_until is not None
