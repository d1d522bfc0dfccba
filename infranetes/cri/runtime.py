# SPDX-License-Identifier: Apache-2.0
"""The CRI's RuntimeService, composed of groups of calls."""

from __future__ import annotations

from functools import partial

from twisted.internet.interfaces import IReactorTime

from infranetes.cri.checkpoints import CheckpointCalls
from infranetes.cri.containers import ContainerCalls, ExecCalls
from infranetes.cri.events import EventCalls
from infranetes.cri.sandboxes import SandboxCalls
from infranetes.cri.stats import StatsCalls
from infranetes.cri.status import StatusCalls
from infranetes.cri.streaming import StreamingCalls, Url, no_url
from infranetes.pods.containers.containers import Containers
from infranetes.pods.keeping.checkpoints import Checkpoints
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.sandboxes.sandboxes import Sandboxes
from infranetes.pods.streams import Streams
from infranetes.pods.vm.listing import Listing
from infranetes.pods.vm.resize import Resizer
from infranetes_common.nanoseconds import nanoseconds
from infranetes_common.wire.cri_rpcs import runtime_service


class RuntimeService:
    """The RuntimeService, with one object per group of calls.

    :param offered: the names of the runtime handlers besides the default one. :param url: makes the URLs of
        streams.
    :ivar service: all the calls as one gRPC service. :ivar events: the event streams, which the owner ends.
    """

    def __init__(
        self,
        clock: IReactorTime,
        status: StatusCalls,
        listing: Listing,
        providers: Providers,
        resizer: Resizer,
        sandboxes: Sandboxes,
        containers: Containers,
        checkpoints: Checkpoints,
        offered: tuple[str, ...] = (),
        url: Url = no_url,
    ) -> None:
        self.events = EventCalls(listing.inventory, partial(nanoseconds, clock))
        self.service = runtime_service(
            status,
            SandboxCalls(clock, listing, providers, resizer, sandboxes, offered),
            ContainerCalls(listing, containers),
            ExecCalls(containers),
            StreamingCalls(Streams(sandboxes, containers), url),
            StatsCalls(clock, listing, providers, sandboxes, containers),
            self.events,
            CheckpointCalls(checkpoints),
        )
