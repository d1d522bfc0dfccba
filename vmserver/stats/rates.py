"""How fast processor time is used: between two samples, as a rule a second apart or more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

WINDOW_NANOS = 1_000_000_000
MAX_RATE = 2**53  # nanoseconds per second: nine million processors


@attrs.frozen
class _Sample:
    at: int
    used: int


class Rates:
    """Keeps two samples of each thing, by its key: asked again at once, it is still that of a second."""

    def __init__(self) -> None:
        self._samples: dict[str, tuple[_Sample | None, _Sample]] = {}

    def put(self, key: str, usage: Any, began: int = 0) -> None:
        """Take in the vmserver.Usage of a thing, and write its rate into it.

        :param began: when the thing began, with no use of the processor, nanoseconds since 1970 UTC; 0: not
            known, and then its first sample has no rate."""
        now = _Sample(usage.time_nanos, usage.cpu.total_nanos)
        older, newer = self._samples.get(key, (None, None))
        if newer is None or now.at < newer.at or now.used < newer.used:  # the first, or it began anew
            older, newer = None, _Sample(began, 0) if 0 < began < now.at else None
        if newer is None:
            self._samples[key] = (None, now)
            return
        if now.at - newer.at >= WINDOW_NANOS:
            self._samples[key] = (newer, now)
            reference = newer
        else:
            self._samples[key] = (older, newer)
            reference = older or newer
        if now.at > reference.at:
            rate = (now.used - reference.used) * 10**9 // (now.at - reference.at)
            usage.cpu.nano_cores.value = min(rate, MAX_RATE)

    def keep(self, keys: Iterable[str]) -> None:
        """Forget all others."""
        for key in self._samples.keys() - set(keys):
            del self._samples[key]
