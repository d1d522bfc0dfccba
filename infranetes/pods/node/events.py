# SPDX-License-Identifier: Apache-2.0
"""The events of sandboxes and containers, emitted as they happen.

    Event       of a container                     of a sandbox
    CREATED     CREATING -> CREATED                LAUNCHING -> READY
    STARTED     -> RUNNING                         LAUNCHING -> READY, next
    STOPPED     -> EXITED, or RUNNING -> REMOVING  READY -> LOST, or STOPPING -> STOPPED; earlier, if the
                                                   cloud announces that it will take its VM away
    DELETED     its record is deleted              its record is deleted

A container that ran is STARTED before it is STOPPED, however soon it ended. What the CRI never showed has no
events. Listeners must neither fail nor block.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING

from infranetes.pods.store.states import SHOWN_SANDBOXES, ContainerState, SandboxState

if TYPE_CHECKING:
    from infranetes.pods.node.inventory import Container, Sandbox


class EventType(enum.Enum):
    """The kind of an event; see the table above."""

    CREATED = "created"
    STARTED = "started"
    STOPPED = "stopped"
    DELETED = "deleted"


Listener = Callable[["EventType", "Sandbox", "Container | None"], None]
"""`listener(event, sandbox, container)`; `container` is None for the sandbox's own events."""


class Events:
    """The listeners, called in the order in which they were added."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """Call `listener` with every event from now on."""
        self._listeners.append(listener)

    def container_changed(self, container: Container, before: ContainerState, after: ContainerState) -> None:
        """Emit the event that a container's change of state means, if any."""
        event = _container_event(before, after)
        if event is not None:
            self._emit(event, container.sandbox, container)

    def container_removed(self, container: Container) -> None:
        """Emit that the container's record is deleted, if the CRI showed it."""
        if container.shown:
            self._emit(EventType.DELETED, container.sandbox, container)

    def sandbox_changed(self, sandbox: Sandbox, before: SandboxState, after: SandboxState) -> None:
        """Emit the events that a sandbox's change of state means, if any."""
        if after is SandboxState.READY:
            self._emit(EventType.CREATED, sandbox, None)
            self._emit(EventType.STARTED, sandbox, None)
        elif after is SandboxState.LOST or (after is SandboxState.STOPPED and not sandbox.record.message):
            self._emit(EventType.STOPPED, sandbox, None)

    def sandbox_interrupted(self, sandbox: Sandbox) -> None:
        """Emit that the sandbox is no longer ready, although its containers still run."""
        if sandbox.state is SandboxState.READY:
            self._emit(EventType.STOPPED, sandbox, None)

    def sandbox_removed(self, sandbox: Sandbox) -> None:
        """Emit that the sandbox's record is deleted, if the CRI showed it."""
        if sandbox.state in SHOWN_SANDBOXES:
            self._emit(EventType.DELETED, sandbox, None)

    def _emit(self, event: EventType, sandbox: Sandbox, container: Container | None) -> None:
        for listener in self._listeners:
            listener(event, sandbox, container)


def _container_event(before: ContainerState, after: ContainerState) -> EventType | None:
    if after is ContainerState.CREATED:
        return EventType.CREATED
    if after is ContainerState.RUNNING:
        return EventType.STARTED
    if after is ContainerState.EXITED:
        return EventType.STOPPED
    if after is ContainerState.REMOVING and before is ContainerState.RUNNING:
        return EventType.STOPPED
    return None
