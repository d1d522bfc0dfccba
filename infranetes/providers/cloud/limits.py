"""How fast a cloud is asked, and when not at all. No I/O: a clock is read, pauses are returned."""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs

_SLOWEST = 0.1  # of the configured rate
_RECOVERY = 1.02  # of the rate, by each call that is not throttled


@attrs.define
class RateLimit:
    """A token bucket that halves its rate when the cloud throttles and recovers as it serves.

    :param now: seconds of a clock that never goes back.
    :param rate: calls a second. :param burst: calls at once, after a rest.
    """

    now: Callable[[], float]
    rate: float
    burst: float
    _current: float = attrs.field(init=False)
    _tokens: float = attrs.field(init=False)
    _at: float = attrs.field(init=False)
    _closed_until: float = 0.0

    def __attrs_post_init__(self) -> None:
        self._current, self._tokens, self._at = self.rate, self.burst, self.now()

    def reserve(self) -> float:
        """Take the next turn; seconds until it comes. A turn that is not used is lost."""
        now = self.now()
        self._tokens = min(self.burst, self._tokens + (now - self._at) * self._current)
        self._at = now
        self._tokens -= 1.0
        wait = -self._tokens / self._current if self._tokens < 0 else 0.0
        return max(wait, self._closed_until - now, 0.0)

    def throttled(self, retry_after: float) -> None:
        """The cloud says: more slowly; and for `retry_after` seconds, not at all."""
        self._current = max(self._current / 2, self.rate * _SLOWEST)
        self._tokens = min(self._tokens, 0.0)
        self._closed_until = max(self._closed_until, self.now() + retry_after)

    def served(self) -> None:
        """A call was answered."""
        self._current = min(self._current * _RECOVERY, self.rate)

    @property
    def current(self) -> float:
        """Calls a second, as of now."""
        return self._current


@attrs.define
class Circuit:
    """Opens after some failures in a row, and lets one call through now and then until it succeeds.

    state    left by                        next
    closed   `threshold` failures in a row  open
    open     time                           half-open: one call goes through
    half     that call succeeds             closed
    half     that call fails                open, for twice the time
    """

    now: Callable[[], float]
    threshold: int = 5
    first: float = 5.0  # seconds
    longest: float = 120.0
    _failures: int = 0
    _pause: float = 0.0
    _open_until: float | None = None
    _probing: bool = False

    def wait(self) -> float:
        """Seconds until a call may be made; 0: now, and it is counted as the probe if one is needed."""
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
        """The cloud answered, be it with a refusal."""
        self._failures, self._pause, self._open_until, self._probing = 0, 0.0, None, False

    def failed(self) -> None:
        """The cloud did not answer, or that it can't."""
        self._failures += 1
        if self._probing or (self._open_until is None and self._failures >= self.threshold):
            self._pause = min(self._pause * 2, self.longest) if self._pause else self.first
            self._open_until = self.now() + self._pause
            self._probing = False

    def abandoned(self) -> None:
        """The call that `wait` allowed was not made after all, or nobody knows its end."""
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether calls are kept back."""
        return self._open_until is not None


def backoff(attempt: int, first: float, most: float, chance: Callable[[], float] = random.random) -> float:
    """Seconds to wait before attempt number `attempt` + 1: between half and all of a doubling pause, so
    that those who failed together do not come back together."""
    whole: float = min(most, first * 2.0 ** min(attempt, 30))
    return whole * (0.5 + chance() / 2)
