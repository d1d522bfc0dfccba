"""The CRI's RuntimeService. What is not here is not offered and answers UNIMPLEMENTED."""

from __future__ import annotations

from infranetes.cri.containers import ContainerCalls, ExecCalls
from infranetes.cri.sandboxes import SandboxCalls
from infranetes.cri.status import StatusCalls
from infranetes.pods.containers import Containers
from infranetes.pods.node import Node
from infranetes.pods.sandboxes import Sandboxes


class RuntimeService(StatusCalls, SandboxCalls, ContainerCalls, ExecCalls):
    """All the groups of calls in one.

    :param handlers: names of the runtime handlers beside the default one.
    """

    def __init__(
        self,
        node: Node,
        sandboxes: Sandboxes,
        containers: Containers,
        handlers: tuple[str, ...] = (),
        cgroup_driver: str = "systemd",
    ) -> None:
        StatusCalls.__init__(self, node, handlers, cgroup_driver)
        SandboxCalls.__init__(self, node, sandboxes, handlers)
        ContainerCalls.__init__(self, node, containers)
        ExecCalls.__init__(self, containers)
