# SPDX-License-Identifier: Apache-2.0
"""Exec, attach and port-forward: opening the call to the agent of the right VM."""

from __future__ import annotations

from infranetes.machines.sessions import PortForwardCall, SessionCall
from infranetes.pods.containers.containers import Containers
from infranetes.pods.node.inventory import Container, Sandbox
from infranetes.pods.sandboxes.sandboxes import Sandboxes
from infranetes.pods.store.states import ContainerState
from infranetes_common.errors import FailedPrecondition


class Streams:
    """The `Agents` of `infranetes.streaming.server`. The caller begins each call with its first message."""

    def __init__(self, sandboxes: Sandboxes, containers: Containers) -> None:
        self._sandboxes = sandboxes
        self._containers = containers

    def container(self, id: str) -> Container:
        """Return the container in which to run a command, or to attach to.

        :raise NotFound: there is none. :raise FailedPrecondition: it is not running."""
        container = self._containers.lookup(id)
        if container.state is not ContainerState.RUNNING:
            raise FailedPrecondition(f"container {container.id} is not running")
        container.sandbox.agent()
        return container

    def sandbox(self, id: str) -> Sandbox:
        """Return the sandbox whose ports to forward.

        :raise NotFound: there is none. :raise FailedPrecondition: it is not ready."""
        sandbox = self._sandboxes.lookup(id)
        sandbox.agent()
        return sandbox

    def exec_call(self, container_id: str) -> SessionCall:
        return self.container(container_id).sandbox.agent().exec()

    def attach_call(self, container_id: str) -> SessionCall:
        return self.container(container_id).sandbox.agent().attach()

    def port_forward_call(self, sandbox_id: str) -> PortForwardCall:
        return self.sandbox(sandbox_id).agent().port_forward()
