# SPDX-License-Identifier: Apache-2.0
"""The states that lists and statuses show. They wait for no VM, except one moment for all after a loss."""

from __future__ import annotations

from collections.abc import Iterable

from twisted.internet.interfaces import IReactorTime

from infranetes.machines.agent.container_watch import Reach
from infranetes.pods.node.inventory import Container, Inventory, Sandbox
from infranetes.pods.store.states import ALIVE, SHOWN_SANDBOXES, ContainerState, SandboxState
from infranetes_common.concurrency import settled, within
from infranetes_common.errors import DeadlineExceeded
from infranetes_common.wire import cri

_SHOWN_AS = {
    ContainerState.CREATED: cri.CONTAINER_CREATED,
    ContainerState.STARTING: cri.CONTAINER_CREATED,
    ContainerState.RUNNING: cri.CONTAINER_RUNNING,
    ContainerState.EXITED: cri.CONTAINER_EXITED,
    ContainerState.REMOVING: cri.CONTAINER_EXITED,
}


class Listing:
    """What the CRI's lists are made from.

    :param seconds: how long a list waits for VMs whose stream was just lost."""

    def __init__(self, clock: IReactorTime, inventory: Inventory, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self.inventory = inventory

    def sandboxes(self) -> list[Sandbox]:
        """Return the sandboxes that the CRI shows."""
        return [sandbox for sandbox in self.inventory if sandbox.state in SHOWN_SANDBOXES]

    def containers(self) -> list[Container]:
        """Return the containers that the CRI shows."""
        return [container for container in self.inventory.containers.values() if container.shown]

    async def refresh(self, sandboxes: Iterable[Sandbox]) -> None:
        """Wait a moment for those agents whose streams were just lost or are being opened, all together."""
        watches = [
            sandbox.watch
            for sandbox in sandboxes
            if sandbox.watch is not None
            and sandbox.watch.worth_waiting
            and sandbox.state is SandboxState.READY
        ]
        if not watches:
            return
        try:
            await within(
                self._clock,
                self._seconds,
                settled([watch.when_attempted() for watch in watches]),
                "the agents",
            )
        except DeadlineExceeded:
            for watch in watches:
                if not watch.live:
                    watch.waited_in_vain()


def shown_state(container: Container) -> cri.ContainerState:
    """Return the CRI's state of a container. An ended one stays EXITED, whatever happens to its VM."""
    if container.state is ContainerState.STARTING and container.start_unconfirmed:
        return cri.CONTAINER_UNKNOWN
    if container.state in ALIVE:
        sandbox = container.sandbox
        if sandbox.watch is not None and sandbox.watch.reach is Reach.SILENT:
            return cri.CONTAINER_UNKNOWN
    return _SHOWN_AS[container.state]
