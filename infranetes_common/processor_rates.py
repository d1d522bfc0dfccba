# SPDX-License-Identifier: Apache-2.0
"""Rates of processor use, between two samples that are a second apart or more."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from infranetes_common.wire import vmserver as messages

WINDOW_NANOS = 1_000_000_000
MAX_RATE = 2**53  # nanoseconds per second: nine million processors


@attrs.frozen
class _Sample:
    at: int
    used: int


class Rates:
    """Keeps two samples for each key, so that a rate covers a second even when it is asked for more often."""

    def __init__(self) -> None:
        self._samples: dict[str, tuple[_Sample | None, _Sample]] = {}

    def put(self, key: str, usage: messages.Usage, began: int = 0) -> None:
        """Add a sample, and set its `cpu.nano_cores`.

        :param began: when the use of the processor was 0, in nanoseconds since 1970 UTC; 0 if that is not
            known, and then the first sample has no rate."""
        now = _Sample(usage.time_nanos, usage.cpu.total_nanos)
        older, newer = self._samples.get(key, (None, None))
        if newer is None or now.at < newer.at or now.used < newer.used:  # first sample, or a reset
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
        """Forget the samples of all other keys."""
        for key in self._samples.keys() - set(keys):
            del self._samples[key]
