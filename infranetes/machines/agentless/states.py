# SPDX-License-Identifier: Apache-2.0
"""The states of a guest as those of the container that it is, and the stream that reports them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from twisted.internet.defer import CancelledError, Deferred

from infranetes.providers.hypervisor import GuestState, GuestStatus, IHypervisor
from infranetes_common.wire import cri, vmserver

_STATES = {
    GuestState.PREPARED: cri.CONTAINER_CREATED,
    GuestState.RUNNING: cri.CONTAINER_RUNNING,
    GuestState.OFF: cri.CONTAINER_EXITED,
    GuestState.CRASHED: cri.CONTAINER_EXITED,
}


def container_state(id: str, status: GuestStatus) -> vmserver.ContainerState:
    """Return the state of the container with this id, which is the guest."""
    ended = status.state in (GuestState.OFF, GuestState.CRASHED)
    reason = status.reason or ("Completed" if status.exit_code == 0 else "Error")
    return vmserver.ContainerState(
        id=id,
        state=_STATES[status.state],
        started_at=status.started_at,
        finished_at=status.finished_at,
        exit_code=status.exit_code if ended else 0,
        reason=reason if ended else "",
        message=status.message,
    )


class GuestEvents:
    """The stream of one guest's states, as our agent's Watch stream has them.

    :param hypervisor: returns the guest's hypervisor.
    :param container: returns the id of the container that the guest is; "": there is none yet.
    """

    def __init__(self, hypervisor: Callable[[], IHypervisor], container: Callable[[], str]) -> None:
        self._hypervisor = hypervisor
        self._container = container
        self._changes: list[GuestStatus] = []
        self._waiting: Deferred[None] | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """End the stream. Idempotent."""
        self._cancelled = True
        self._wake()

    async def __aiter__(self) -> AsyncIterator[vmserver.WatchEvent]:
        hypervisor = self._hypervisor()
        unwatch = hypervisor.watch(self._changed)
        try:
            status = await hypervisor.status()
            # Changes until now are in the status.
            self._changes.clear()
            for event in self._events(status):
                yield event
            yield vmserver.WatchEvent(synced=vmserver.Synced())
            while not self._cancelled:
                while self._changes:
                    for event in self._events(self._changes.pop(0)):
                        yield event
                if self._cancelled:
                    break
                self._waiting = Deferred()
                await self._waiting
            raise CancelledError
        finally:
            unwatch()

    def _events(self, status: GuestStatus) -> list[vmserver.WatchEvent]:
        id = self._container()
        return [vmserver.WatchEvent(container=container_state(id, status))] if id else []

    def _changed(self, status: GuestStatus) -> None:
        self._changes.append(status)
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.called:
            waiting.callback(None)
