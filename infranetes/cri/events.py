# SPDX-License-Identifier: Apache-2.0
"""GetContainerEvents: sends each change, with the state after it, to every listener."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable

from twisted.logger import Logger

from infranetes.cri import translate
from infranetes.pods.node.events import EventType
from infranetes.pods.node.inventory import Container, Inventory, Sandbox
from infranetes_common.concurrency import Notifier
from infranetes_common.errors import ResourceExhausted, Unavailable
from infranetes_common.wire import cri
from infranetes_common.wire.cri_rpcs import RuntimeEventRpcs
from txgrpc import Call

MAX_LISTENERS = 64
MAX_EVENTS = 1000  # events waiting for one listener
MAX_BYTES = 8 * 1024 * 1024
# The most bytes of one event. In a larger one, the fields whose size the VM determines are cut.
MAX_EVENT = 256 * 1024

_TYPES = {
    EventType.CREATED: cri.CONTAINER_CREATED_EVENT,
    EventType.STARTED: cri.CONTAINER_STARTED_EVENT,
    EventType.STOPPED: cri.CONTAINER_STOPPED_EVENT,
    EventType.DELETED: cri.CONTAINER_DELETED_EVENT,
}
_log = Logger()


class Listener:
    """The events that wait for one listener.

    A listener that is too slow is dropped, which ends its stream."""

    def __init__(self) -> None:
        self._events: deque[bytes] = deque()
        self._size = 0
        self._error: Exception | None = None
        self._changed = Notifier()

    def put(self, event: bytes) -> bool:
        """Append an event, and return whether there was room for it."""
        if len(self._events) >= MAX_EVENTS or self._size + len(event) > MAX_BYTES:
            self._events.clear()
            self.end(
                ResourceExhausted(
                    f"the listener is too slow: over {MAX_EVENTS} events wait for it; list pods and "
                    "containers, then listen again"
                )
            )
            return False
        self._events.append(event)
        self._size += len(event)
        self._changed.notify()
        return True

    def end(self, error: Exception) -> None:
        """Raise `error` to the listener, after the events that wait already."""
        self._error = self._error or error
        self._changed.notify()

    async def take(self) -> bytes:
        """Return the next event, waiting for one."""
        while not self._events:
            if self._error is not None:
                raise self._error
            await self._changed.wait()
        event = self._events.popleft()
        self._size -= len(event)
        return event


class EventCalls(RuntimeEventRpcs):
    """Sends every change to all listeners, and waits for none of them.

    :param now: returns the time in nanoseconds since 1970 UTC.
    """

    def __init__(self, inventory: Inventory, now: Callable[[], int]) -> None:
        self._now = now
        self._listeners: set[Listener] = set()
        inventory.events.listen(self._changed)

    async def GetContainerEvents(self, request: cri.GetEventsRequest, call: Call) -> AsyncIterator[bytes]:
        if len(self._listeners) >= MAX_LISTENERS:
            raise ResourceExhausted(f"{MAX_LISTENERS} clients listen to events already: end one of them")
        listener = Listener()
        self._listeners.add(listener)
        try:
            while True:
                yield await listener.take()
        finally:
            self._listeners.discard(listener)

    def stop(self) -> None:
        """End every listener's stream, because the daemon is stopping."""
        self.end(Unavailable("the daemon is stopping: listen again once it has started"))

    def end(self, error: Exception) -> None:
        """End every listener's stream with `error`, after the events that wait already."""
        for listener in list(self._listeners):
            listener.end(error)

    def tell(self, event: bytes) -> None:
        """Send a change, a serialized ContainerEventResponse, to every listener."""
        for listener in list(self._listeners):
            if not listener.put(event):
                self._listeners.discard(listener)
                _log.warn(
                    "a listener to events is dropped: over {events} events wait for it", events=MAX_EVENTS
                )

    def _changed(self, what: EventType, sandbox: Sandbox, container: Container | None) -> None:
        if not self._listeners:
            return
        try:
            event = _slim(self._event(what, sandbox, container)).SerializeToString()
        except Exception:
            _log.failure("an event of sandbox {sandbox} could not be sent", sandbox=sandbox.id)
            return
        self.tell(event)

    def _event(
        self, what: EventType, sandbox: Sandbox, container: Container | None
    ) -> cri.ContainerEventResponse:
        event = cri.ContainerEventResponse(
            container_id=sandbox.id if container is None else container.id,
            container_event_type=_TYPES[what],
            created_at=self._now(),
            containers_statuses=translate.container_statuses(sandbox),
        )
        if what is not EventType.DELETED or container is not None:
            event.pod_sandbox_status.CopyFrom(translate.sandbox_status(sandbox))
        return event


def _slim(event: cri.ContainerEventResponse) -> cri.ContainerEventResponse:
    """Shorten the containers' statuses in an event of more than MAX_EVENT bytes."""
    if event.ByteSize() > MAX_EVENT:
        _log.warn(
            "an event of {container} is too large: what its VM reports about its containers is cut",
            container=event.container_id,
        )
        for status in event.containers_statuses:
            status.message = status.message[:128]
            status.ClearField("user")
            status.ClearField("resources")
    return event
