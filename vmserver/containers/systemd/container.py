# SPDX-License-Identifier: Apache-2.0
"""A container in this process: its record, a lock, and its end."""

from __future__ import annotations

from twisted.internet.defer import Deferred, DeferredLock, succeed

from infranetes_common.concurrency import Event
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from vmserver.containers.records import Record


class UnitContainer:
    """A container that is a unit of systemd."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.lock = DeferredLock()  # held while the container's unit is queried or started
        self.removed = False
        self._ended: Event[None] = Event()

    @property
    def over(self) -> bool:
        """True if it has ended or been removed."""
        return self.removed or self.record.state.state == cri.CONTAINER_EXITED

    def state(self) -> messages.ContainerState:
        """Return a copy of its state."""
        state = messages.ContainerState()
        state.CopyFrom(self.record.state)
        return state

    def when_over(self) -> Deferred[None]:
        """Fire once the container has ended or is removed."""
        return succeed(None) if self.over else self._ended.wait()

    def notify(self) -> None:
        """Wake the waiters for the container's end if it has ended. Called after each change of state."""
        if self.over:
            self._ended.succeed(None)
