# SPDX-License-Identifier: Apache-2.0
"""Lines that tell how far an upload is."""

from __future__ import annotations

import time
from collections.abc import Callable

from infranetes.publish.interface import Report

EVERY = 5.0  # seconds between two lines
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def readable(size: float) -> str:
    """Return a size for people: `1.5 GiB`."""
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit and size < 100 else f"{size:.0f} {_UNITS[unit]}"


class UploadProgress:
    """The progress of one upload.

    :param total: bytes. :param done: bytes that an earlier run has sent."""

    def __init__(
        self,
        what: str,
        total: int,
        report: Report,
        done: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total, self._report, self._clock = what, total, report, clock
        self._done = self._before = done
        self._begun = self._told = clock()
        if done:
            report(f"{what}: {readable(done)} of {readable(total)} were sent before")

    def add(self, size: int) -> None:
        """Say that more bytes were sent."""
        self._done += size
        if self._done >= self._total or self._clock() - self._told >= EVERY:
            self._tell()

    def _tell(self) -> None:
        self._told = self._clock()
        seconds = self._told - self._begun
        percent = 100 * self._done // max(self._total, 1)
        speed = (self._done - self._before) / seconds if seconds >= 1 else 0.0
        at = f", {readable(speed)}/s" if speed else ""
        self._report(
            f"{self._what}: {readable(self._done)} of {readable(self._total)}, {percent} %, "
            f"{seconds:.0f} s{at}"
        )
