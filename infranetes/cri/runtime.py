# SPDX-License-Identifier: Apache-2.0
"""The CRI's RuntimeService, composed of groups of calls."""

from __future__ import annotations

from infranetes.cri.checkpoints import CheckpointCalls
from infranetes.cri.containers import ContainerCalls, ExecCalls
from infranetes.cri.events import EventCalls
from infranetes.cri.sandboxes import SandboxCalls
from infranetes.cri.stats import StatsCalls
from infranetes.cri.status import Settings, StatusCalls
from infranetes.cri.streaming import StreamingCalls, Url, no_url
from infranetes.pods.containers.containers import Containers
from infranetes.pods.keeping.checkpoints import Checkpoints
from infranetes.pods.node.context import NodeContext
from infranetes.pods.sandboxes.sandboxes import Sandboxes
from infranetes.pods.streams import Streams
from infranetes.pods.vm.listing import Listing
from infranetes.pods.vm.resize import Resizer
from infranetes_common.wire.cri_rpcs import runtime_service


class RuntimeService:
    """The RuntimeService, with one object per group of calls.

    :param handlers: the names of the runtime handlers besides the default one.
    :param url: makes the URLs of streams. :param settings: returns the configuration, for Status.
    :ivar service: all the calls as one gRPC service. :ivar events: the event streams, which the owner ends.
    """

    def __init__(
        self,
        node: NodeContext,
        sandboxes: Sandboxes,
        containers: Containers,
        checkpoints: Checkpoints,
        handlers: tuple[str, ...] = (),
        cgroup_driver: str = "systemd",
        url: Url = no_url,
        settings: Settings | None = None,
    ) -> None:
        listing = Listing(node.clock, node.inventory, node.times.listing)
        self.events = EventCalls(node.inventory, node.now)
        self.service = runtime_service(
            StatusCalls(node, handlers, cgroup_driver, settings),
            SandboxCalls(node.clock, listing, node.providers, Resizer(node), sandboxes, handlers),
            ContainerCalls(listing, containers),
            ExecCalls(containers),
            StreamingCalls(Streams(sandboxes, containers), url),
            StatsCalls(node.clock, listing, node.providers, sandboxes, containers),
            self.events,
            CheckpointCalls(checkpoints),
        )
