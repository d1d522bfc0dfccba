# SPDX-License-Identifier: Apache-2.0
"""How long it takes until a VM has what the API server has said."""

from __future__ import annotations

import math
from collections import deque

import attrs

MOST_NEWS = 1000
MOST_TIMES = 256


class News:
    """When the API server told of the table's last changes."""

    def __init__(self) -> None:
        self._heard: deque[tuple[int, float]] = deque(maxlen=MOST_NEWS)

    def note(self, number: int, heard_at: float) -> None:
        """Note that the changes up to `number` come of what was heard then. Others before it are noted."""
        if number > (self._heard[-1][0] if self._heard else 0):
            self._heard.append((number, heard_at))

    def after(self, number: int) -> float | None:
        """When the first change after `number` was heard of. None: there is none, or it is not known."""
        found = None
        for last, heard_at in reversed(self._heard):
            if last <= number:
                break
            found = heard_at
        return found


class Times:
    """The last of some durations, in seconds."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=MOST_TIMES)

    def add(self, seconds: float) -> None:
        self._seconds.append(max(seconds, 0.0))

    @property
    def count(self) -> int:
        return len(self._seconds)

    @property
    def last(self) -> float | None:
        """None: there has been none."""
        return self._seconds[-1] if self._seconds else None

    def quantile(self, part: float) -> float | None:
        """The smallest one that at least `part` of them don't exceed. None: there has been none."""
        if not self._seconds:
            return None
        return sorted(self._seconds)[max(math.ceil(part * len(self._seconds)) - 1, 0)]


@attrs.frozen
class Progress:
    """How far a VM is with its rules.

    :ivar number: up to which it has them; -1: that is not known.
    :ivar behind: the changes that it lacks; None: it is to be sent all rules.
    :ivar trouble: why it can't be told now; empty: it can.
    :ivar heard_seconds: since it last answered; None: it never did.
    :ivar last_seconds: from the API server's word until it was in force in the VM, the last time.
    :ivar p99_seconds: the same, of the slowest in a hundred. :ivar count: of how many.
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
        """Whether the VM has what the node has."""
        return self.number >= 0 and self.behind == 0
