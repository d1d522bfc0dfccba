"""What lists and statuses show. No list waits for a VM, but a moment for all at once after a loss."""

from __future__ import annotations

from collections.abc import Iterable

from infranetes.agent.view import Reach
from infranetes.pods.inventory import Container, Sandbox
from infranetes.pods.node import Node
from infranetes.pods.states import SHOWN_SANDBOXES, ContainerState, SandboxState
from infranetes.pods.waits import go, settle, within
from infranetes_common import cri
from infranetes_common.errors import DeadlineExceeded

_SHOWN_AS = {
    ContainerState.CREATED: cri.CONTAINER_CREATED,
    ContainerState.RUNNING: cri.CONTAINER_RUNNING,
    ContainerState.EXITED: cri.CONTAINER_EXITED,
    ContainerState.REMOVING: cri.CONTAINER_EXITED,
}


async def refresh(node: Node, sandboxes: Iterable[Sandbox]) -> None:
    """Give the agents whose stream was just lost, or not had yet, one moment together to come back."""
    views = [
        one.view for one in sandboxes
        if one.view is not None and one.view.hopeful and one.state is SandboxState.READY
    ]  # fmt: skip
    if not views:
        return
    try:
        await within(
            node.clock, node.times.listing, go(settle([view.when_told() for view in views])), "the agents"
        )
    except DeadlineExceeded:
        for view in views:
            if not view.live:
                view.waited_in_vain()


def shown_state(container: Container) -> cri.ContainerState:
    """The CRI's state of a container that is shown. What has ended has ended, whatever became of its VM."""
    if container.state in (ContainerState.CREATED, ContainerState.RUNNING):
        sandbox = container.sandbox
        if sandbox.view is not None and sandbox.view.reach is Reach.UNREACHABLE:
            return cri.CONTAINER_UNKNOWN
    return _SHOWN_AS[container.state]


def sandboxes(node: Node) -> list[Sandbox]:
    """The sandboxes that the CRI shows."""
    return [one for one in node.inventory.sandboxes.values() if one.state in SHOWN_SANDBOXES]


def containers(node: Node) -> list[Container]:
    """The containers that the CRI shows."""
    return [one for one in node.inventory.containers.values() if one.shown]
