"""One container as the agent's process sees it, and who waits for it."""

from __future__ import annotations

from twisted.internet.defer import Deferred, DeferredLock, succeed

from infranetes_common import cri
from infranetes_common import vmserver as messages
from vmserver.containers.systemd.records import Record


class Known:
    """One container of this process's view."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.lock = DeferredLock()  # one look, and one start, at a time
        self.gone = False
        self.changed: list[Deferred[None]] = []  # who waits for another state
        self.finished: list[Deferred[None]] = []  # who waits for its end

    @property
    def over(self) -> bool:
        return self.gone or bool(self.record.state.state == cri.CONTAINER_EXITED)

    def state(self) -> messages.ContainerState:
        """A copy of its state."""
        state = messages.ContainerState()
        state.CopyFrom(self.record.state)
        return state

    def when(self, waiting: list[Deferred[None]]) -> Deferred[None]:
        """Fires with the others in `waiting`."""

        def cancelled(one: Deferred[None]) -> None:
            if one in waiting:
                waiting.remove(one)

        one: Deferred[None] = Deferred(cancelled)
        waiting.append(one)
        return one

    def when_over(self) -> Deferred[None]:
        """Fires once it has ended or is forgotten."""
        return succeed(None) if self.over else self.when(self.finished)

    def tell(self) -> None:
        """It has another state."""
        for waiting in [self.changed, *([self.finished] if self.over else [])]:
            told, waiting[:] = waiting[:], []
            for one in told:
                one.callback(None)
