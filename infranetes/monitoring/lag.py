# SPDX-License-Identifier: Apache-2.0
"""How late the reactor is: it has one thread, and whatever holds that up delays everything else."""

from __future__ import annotations

from collections.abc import Callable

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime

from infranetes_common.concurrency import sleep, start

PERIOD = 0.5  # seconds between two measurements


class ReactorLag(Service):
    """Measures by a timed call, again and again, how late such calls are.

    :param observe: called with each delay, in seconds."""

    def __init__(self, clock: IReactorTime, observe: Callable[[float], None]) -> None:
        self._clock = clock
        self._observe = observe
        self._measuring: Deferred[None] | None = None

    def startService(self) -> None:
        """Begin to measure."""
        Service.startService(self)
        self._measuring = start(self._measure())
        self._measuring.addErrback(lambda failure: failure.trap(CancelledError) and None)

    def stopService(self) -> None:
        """Stop measuring."""
        Service.stopService(self)
        if self._measuring is not None:
            self._measuring.cancel()

    async def _measure(self) -> None:
        while True:
            due = self._clock.seconds() + PERIOD
            await sleep(self._clock, PERIOD)
            self._observe(max(self._clock.seconds() - due, 0.0))
