"""The CRI's RuntimeService. What is not here is not offered and answers UNIMPLEMENTED."""

from __future__ import annotations

from infranetes.cri.containers import ContainerCalls, ExecCalls
from infranetes.cri.events import EventCalls
from infranetes.cri.sandboxes import SandboxCalls
from infranetes.cri.stats import StatsCalls
from infranetes.cri.status import StatusCalls
from infranetes.cri.streaming import StreamingCalls, Url
from infranetes.pods.containers import Containers
from infranetes.pods.node import Node
from infranetes.pods.sandboxes import Sandboxes
from infranetes.pods.streams import Streams
from infranetes_common.errors import FailedPrecondition


def _no_url(kind: str, request: object) -> str:
    raise FailedPrecondition("no streams are served here")


class RuntimeService(
    StatusCalls, SandboxCalls, ContainerCalls, ExecCalls, StreamingCalls, StatsCalls, EventCalls
):
    """All the groups of calls in one.

    :param handlers: names of the runtime handlers beside the default one.
    :param url: makes the URLs of streams.
    """

    def __init__(
        self,
        node: Node,
        sandboxes: Sandboxes,
        containers: Containers,
        handlers: tuple[str, ...] = (),
        cgroup_driver: str = "systemd",
        url: Url = _no_url,
    ) -> None:
        StatusCalls.__init__(self, node, handlers, cgroup_driver)
        SandboxCalls.__init__(self, node, sandboxes, handlers)
        ContainerCalls.__init__(self, node, containers)
        ExecCalls.__init__(self, containers)
        StreamingCalls.__init__(self, Streams(sandboxes, containers), url)
        StatsCalls.__init__(self, node, sandboxes, containers)
        EventCalls.__init__(self, node)
