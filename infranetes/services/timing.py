# SPDX-License-Identifier: Apache-2.0
"""Measuring how long a change takes from the API server into a VM."""

from __future__ import annotations

import math
from collections import deque

import attrs

MOST_NEWS = 1000
MOST_TIMES = 256


class News:
    """The times at which the table's latest changes were received from the API server."""

    def __init__(self) -> None:
        self._heard: deque[tuple[int, float]] = deque(maxlen=MOST_NEWS)

    def note(self, number: int, heard_at: float) -> None:
        """Record when the changes up to `number`, as far as not recorded before, were received."""
        if number > (self._heard[-1][0] if self._heard else 0):
            self._heard.append((number, heard_at))

    def after(self, number: int) -> float | None:
        """Return when the first change after `number` was received; None: no such change is known."""
        found = None
        for last, heard_at in reversed(self._heard):
            if last <= number:
                break
            found = heard_at
        return found


class Times:
    """The latest MOST_TIMES of some durations, in seconds."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=MOST_TIMES)

    def add(self, seconds: float) -> None:
        self._seconds.append(max(seconds, 0.0))

    @property
    def count(self) -> int:
        return len(self._seconds)

    @property
    def last(self) -> float | None:
        """The latest duration; None: there has been none."""
        return self._seconds[-1] if self._seconds else None

    def quantile(self, part: float) -> float | None:
        """Return the smallest duration that at least `part` (0 to 1) of them do not exceed, or None."""
        if not self._seconds:
            return None
        return sorted(self._seconds)[max(math.ceil(part * len(self._seconds)) - 1, 0)]


@attrs.frozen
class RuleProgress:
    """How far a VM is with its rules.

    :ivar number: the number up to which it has the changes; -1: not known.
    :ivar behind: how many changes it lacks; None: it will be sent all rules.
    :ivar trouble: why rules can't be sent to it now; "": they can be.
    :ivar heard_seconds: the time since its last answer; None: it never answered.
    :ivar last_seconds: the time from receiving the last change until it was in force in the VM.
    :ivar p99_seconds: the 99th percentile of these times. :ivar count: how many were measured.
    """

    number: int
    behind: int | None
    trouble: str
    heard_seconds: float | None
    last_seconds: float | None
    p99_seconds: float | None
    count: int

    @property
    def current(self) -> bool:
        """Whether the VM has all of the node's changes."""
        return self.number >= 0 and self.behind == 0
