"""What becomes of sandboxes and containers, told as it happens to whoever listens.

    Told        of a container                     of a sandbox
    CREATED     CREATING -> CREATED                LAUNCHING -> READY
    STARTED     -> RUNNING                         LAUNCHING -> READY, next
    STOPPED     -> EXITED, or what ran -> REMOVING READY -> LOST, or STOPPING -> STOPPED
    DELETED     its record goes                    its record goes

A container seen for the first time when it has ended already is told STARTED before STOPPED. What the CRI
never showed is not told of. Who is told must neither fail nor wait.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING

from infranetes.pods.states import SHOWN_SANDBOXES, ContainerState, SandboxState

if TYPE_CHECKING:
    from infranetes.pods.inventory import Container, Sandbox


class Happening(enum.Enum):
    """What happened; see the table above."""

    CREATED = "created"
    STARTED = "started"
    STOPPED = "stopped"
    DELETED = "deleted"


Told = Callable[["Happening", "Sandbox", "Container | None"], None]
"""`told(what, sandbox, container)`: None: of the sandbox itself."""


class Events:
    """Calls everybody who listens, in turn."""

    def __init__(self) -> None:
        self._listeners: list[Told] = []

    def listen(self, told: Told) -> None:
        """Call `told` from now on."""
        self._listeners.append(told)

    def container_changed(self, container: Container, before: ContainerState, after: ContainerState) -> None:
        """The container has another state."""
        for what in _of_container(container, before, after):
            self._tell(what, container.sandbox, container)

    def container_gone(self, container: Container) -> None:
        """The container has no record any more."""
        if container.shown:
            self._tell(Happening.DELETED, container.sandbox, container)

    def sandbox_changed(self, sandbox: Sandbox, before: SandboxState, after: SandboxState) -> None:
        """The sandbox has another state."""
        if after is SandboxState.READY:
            self._tell(Happening.CREATED, sandbox, None)
            self._tell(Happening.STARTED, sandbox, None)
        elif after is SandboxState.LOST or (after is SandboxState.STOPPED and not sandbox.record.message):
            self._tell(Happening.STOPPED, sandbox, None)

    def sandbox_gone(self, sandbox: Sandbox) -> None:
        """The sandbox has no record any more."""
        if sandbox.state in SHOWN_SANDBOXES:
            self._tell(Happening.DELETED, sandbox, None)

    def _tell(self, what: Happening, sandbox: Sandbox, container: Container | None) -> None:
        for told in self._listeners:
            told(what, sandbox, container)


def _of_container(container: Container, before: ContainerState, after: ContainerState) -> list[Happening]:
    if after is ContainerState.CREATED:
        return [Happening.CREATED]
    if after is ContainerState.RUNNING:
        return [Happening.STARTED]
    if after is ContainerState.EXITED:
        unseen = before is ContainerState.CREATED and container.record.started_at
        return [Happening.STARTED, Happening.STOPPED] if unseen else [Happening.STOPPED]
    if after is ContainerState.REMOVING and before is ContainerState.RUNNING:
        return [Happening.STOPPED]
    return []
