# SPDX-License-Identifier: Apache-2.0
"""A signal that wakes all who wait for it, again and again."""

from __future__ import annotations

from twisted.internet.defer import Deferred


class Notifier:
    """Wakes all present waiters; later ones wait for the next notification.

    A notification that nobody waits for is lost, so check your condition before and after the wait::

        while not self.queue:
            await self._changed.wait()

    For what happens once see `Event`; for a queue of values use Twisted's `DeferredQueue`.
    """

    def __init__(self) -> None:
        self._waiting: dict[Deferred[None], None] = {}

    @property
    def waiters(self) -> int:
        """The number of callers that are waiting now."""
        return len(self._waiting)

    def wait(self) -> Deferred[None]:
        """Fire at the next `notify`. May be cancelled."""
        waiting: Deferred[None] = Deferred(self._forget)
        self._waiting[waiting] = None
        return waiting

    def notify(self) -> None:
        """Wake all waiters, in the order of their arrival, before this returns."""
        waiting, self._waiting = self._waiting, {}
        for each in waiting:
            if not each.called:  # an earlier waiter may have cancelled it
                each.callback(None)

    def _forget(self, waiting: Deferred[None]) -> None:
        self._waiting.pop(waiting, None)
