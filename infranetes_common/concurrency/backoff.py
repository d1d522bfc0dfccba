# SPDX-License-Identifier: Apache-2.0
"""Pauses between attempts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator


def backoff(
    first: float,
    most: float,
    *,
    factor: float = 2.0,
    jitter: float = 0.0,
    chance: Callable[[], float] = random.random,
) -> Iterator[float]:
    """Yield seconds to pause before one more attempt, without end: `first`, growing by `factor` up to `most`.

    Begin anew with another iterator once an attempt has succeeded::

        pauses = backoff(0.1, 5.0)
        while not await self._attempt():
            await sleep(clock, next(pauses))

    :param jitter: the part of each pause, from 0 to 1, that is left to chance, so that clients which failed
        together do not come back together: a pause of 4 s with a jitter of 0.5 lasts 2 to 4 s.
    """
    pause = min(first, most)
    while True:
        yield pause * (1 - jitter * chance()) if jitter else pause
        pause = min(pause * factor, most)
