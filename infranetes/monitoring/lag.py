# SPDX-License-Identifier: Apache-2.0
"""How late the reactor is with what is due: it has one thread, and whatever keeps that is felt by all."""

from __future__ import annotations

from collections.abc import Callable

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime

from infranetes_common.concurrency import sleep, start

PERIOD = 0.5  # seconds between two looks


class ReactorLag(Service):
    """Looks again and again.

    :param observe: is called with the seconds that a timed call was late."""

    def __init__(self, clock: IReactorTime, observe: Callable[[float], None]) -> None:
        self._clock = clock
        self._observe = observe
        self._looks: Deferred[None] | None = None

    def startService(self) -> None:
        """Begin."""
        Service.startService(self)
        self._looks = start(self._look())
        self._looks.addErrback(lambda failure: failure.trap(CancelledError) and None)

    def stopService(self) -> None:
        """End."""
        Service.stopService(self)
        if self._looks is not None:
            self._looks.cancel()

    async def _look(self) -> None:
        while True:
            due = self._clock.seconds() + PERIOD
            await sleep(self._clock, PERIOD)
            self._observe(max(self._clock.seconds() - due, 0.0))
