# SPDX-License-Identifier: Apache-2.0
"""The table of the routes of the CRI's RPCs on a node with a delegate."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType


class Route(enum.Enum):
    """The ways to find out who answers an RPC."""

    SANDBOX = "whose the sandbox is that field 1 names"
    CONTAINER = "whose the container is that field 1 names"
    HANDLER = "whose the runtime handler is that field 2 names"
    IMAGE = "whose the image is that field 1 names"
    LIST = "both, and their lists are joined; without the delegate's there is none"
    DESCRIPTORS = "as LIST, but what has the same name as one of the delegate's is left out"
    PAGES = "both: our messages, then the delegate's; without the delegate's there are none"
    STATUS = "the delegate, with what we add"
    DELEGATE = "the delegate alone"
    EVENTS = "both, each change as it comes"


_RUNTIME = {
    Route.SANDBOX: (
        "StopPodSandbox",
        "RemovePodSandbox",
        "PodSandboxStatus",
        "CreateContainer",
        "PortForward",
        "PodSandboxStats",
        "UpdatePodSandboxResources",
    ),
    Route.CONTAINER: (
        "StartContainer",
        "StopContainer",
        "RemoveContainer",
        "ContainerStatus",
        "UpdateContainerResources",
        "ReopenContainerLog",
        "ExecSync",
        "Exec",
        "Attach",
        "ContainerStats",
        "CheckpointContainer",
    ),
    Route.HANDLER: ("RunPodSandbox",),
    Route.LIST: (
        "ListPodSandbox",
        "ListContainers",
        "ListContainerStats",
        "ListPodSandboxStats",
        "ListPodSandboxMetrics",
    ),
    Route.DESCRIPTORS: ("ListMetricDescriptors",),
    Route.PAGES: (
        "StreamPodSandboxes",
        "StreamContainers",
        "StreamContainerStats",
        "StreamPodSandboxStats",
        "StreamPodSandboxMetrics",
    ),
    Route.STATUS: ("Status",),
    # Only the CNI may give out addresses of the node's pod CIDR.
    Route.DELEGATE: ("Version", "RuntimeConfig", "UpdateRuntimeConfig"),
    Route.EVENTS: ("GetContainerEvents",),
}
_IMAGES = {
    Route.IMAGE: ("PullImage", "ImageStatus", "RemoveImage"),
    Route.LIST: ("ListImages",),
    Route.PAGES: ("StreamImages",),
    Route.DELEGATE: ("ImageFsInfo",),
}


def _paths(service: str, routes: Mapping[Route, tuple[str, ...]]) -> dict[str, Route]:
    return {f"/runtime.v1.{service}/{name}": route for route, names in routes.items() for name in names}


#: Routes by the RPC's path. Any other RPC is a newer CRI's, and for the delegate alone.
ROUTES: Mapping[str, Route] = MappingProxyType(
    {**_paths("RuntimeService", _RUNTIME), **_paths("ImageService", _IMAGES)}
)
#: The beginning of the paths of a newer CRI's RPCs.
CRI = "/runtime.v1."
