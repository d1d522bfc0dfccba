"""Where exec, attach and port-forward go: a call to the agent of the right VM."""

from __future__ import annotations

from typing import Any

from infranetes.agent.client import AgentClient
from infranetes.pods.containers import Containers
from infranetes.pods.inventory import Container, Sandbox
from infranetes.pods.sandboxes import Sandboxes
from infranetes.pods.states import ContainerState, SandboxState
from infranetes_common.errors import FailedPrecondition


class Streams:
    """The `Agents` of `infranetes.streaming.server`. Each call is to be begun by its first message."""

    def __init__(self, sandboxes: Sandboxes, containers: Containers) -> None:
        self._sandboxes = sandboxes
        self._containers = containers

    def container(self, id: str) -> Container:
        """The container in which a command can run or to which one can attach.

        :raise NotFound: there is none. :raise FailedPrecondition: it is not running."""
        container = self._containers.known(id)
        if container.state is not ContainerState.RUNNING:
            raise FailedPrecondition(f"container {container.id} is not running")
        self._agent(container.sandbox)
        return container

    def sandbox(self, id: str) -> Sandbox:
        """The sandbox whose ports can be reached.

        :raise NotFound: there is none. :raise FailedPrecondition: it is not ready."""
        sandbox = self._sandboxes.known(id)
        self._agent(sandbox)
        return sandbox

    def exec_call(self, container_id: str) -> Any:
        container = self.container(container_id)
        return self._agent(container.sandbox).exec()

    def attach_call(self, container_id: str) -> Any:
        container = self.container(container_id)
        return self._agent(container.sandbox).attach()

    def port_forward_call(self, sandbox_id: str) -> Any:
        return self._agent(self.sandbox(sandbox_id)).port_forward()

    def _agent(self, sandbox: Sandbox) -> AgentClient:
        if sandbox.state is not SandboxState.READY or sandbox.client is None:
            raise FailedPrecondition(f"sandbox {sandbox.id} is not ready: it is {sandbox.state.value}")
        return sandbox.client
