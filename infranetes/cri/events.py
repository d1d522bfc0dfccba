"""GetContainerEvents: what happens, to everybody who listens, each with the state after it."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from infranetes.cri import translate
from infranetes.pods.events import Happening
from infranetes.pods.inventory import Container, Sandbox
from infranetes.pods.node import Node
from infranetes_common import cri
from infranetes_common.errors import InfranetesError, ResourceExhausted, Unavailable

MAX_LISTENERS = 64
MAX_EVENTS = 1000  # kept for one listener who does not take them
MAX_BYTES = 8 * 1024 * 1024

_TYPES = {
    Happening.CREATED: cri.CONTAINER_CREATED_EVENT,
    Happening.STARTED: cri.CONTAINER_STARTED_EVENT,
    Happening.STOPPED: cri.CONTAINER_STOPPED_EVENT,
    Happening.DELETED: cri.CONTAINER_DELETED_EVENT,
}
_log = Logger()


class Listener:
    """What one listener has not been sent yet. Over its bounds it is dropped, and listening ends."""

    def __init__(self) -> None:
        self._events: deque[bytes] = deque()
        self._size = 0
        self._over: InfranetesError | None = None
        self._wake: Deferred[None] | None = None

    def put(self, event: bytes) -> bool:
        """Whether there was room for it."""
        if len(self._events) >= MAX_EVENTS or self._size + len(event) > MAX_BYTES:
            self._events.clear()
            self.end(
                ResourceExhausted(
                    f"events were not taken as they came, and over {MAX_EVENTS} of them wait: list pods and "
                    "containers, then listen again"
                )
            )
            return False
        self._events.append(event)
        self._size += len(event)
        self._notify()
        return True

    def end(self, error: InfranetesError) -> None:
        """No more than what waits already, then `error`."""
        self._over = self._over or error
        self._notify()

    async def take(self) -> bytes:
        """The next event, once there is one."""
        while not self._events:
            if self._over is not None:
                raise self._over
            self._wake = Deferred()
            await self._wake
        event = self._events.popleft()
        self._size -= len(event)
        return event

    def _notify(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None and not wake.called:
            wake.callback(None)


class EventCalls:
    """Tells all listeners, and waits for none."""

    def __init__(self, node: Node) -> None:
        self._events_node = node
        self._listeners: set[Listener] = set()
        node.inventory.events.listen(self._happened)

    async def GetContainerEvents(self, request: cri.GetEventsRequest, call: Any) -> AsyncIterator[bytes]:
        if len(self._listeners) >= MAX_LISTENERS:
            raise ResourceExhausted(f"{MAX_LISTENERS} listen to events already: end one of them")
        listener = Listener()
        self._listeners.add(listener)
        try:
            while True:
                yield await listener.take()
        finally:
            self._listeners.discard(listener)

    def end_events(self) -> None:
        """Nobody is told any more."""
        for listener in list(self._listeners):
            listener.end(Unavailable("the daemon is stopping: listen again once it has started"))

    def _happened(self, what: Happening, sandbox: Sandbox, container: Container | None) -> None:
        if not self._listeners:
            return
        event = self._event(what, sandbox, container).SerializeToString()
        for listener in list(self._listeners):
            if not listener.put(event):
                self._listeners.discard(listener)
                _log.warn("a listener is told no more events: over {events} wait for it", events=MAX_EVENTS)

    def _event(self, what: Happening, sandbox: Sandbox, container: Container | None) -> Any:
        event = cri.ContainerEventResponse(
            container_id=sandbox.id if container is None else container.id,
            container_event_type=_TYPES[what],
            created_at=self._events_node.now(),
            containers_statuses=[
                translate.container_status(one) for one in sandbox.containers.values() if one.shown
            ],
        )
        if what is not Happening.DELETED or container is not None:
            event.pod_sandbox_status.CopyFrom(translate.sandbox_status(sandbox))
        return event
