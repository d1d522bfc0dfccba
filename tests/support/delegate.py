# SPDX-License-Identifier: Apache-2.0
"""A fake of a node's runtime, in this process: a CRI server on a socket, for proxies in front of it.

It adds to each response a field that no release knows, and keeps every request's bytes.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from google.protobuf.message import Message
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import UNIXServerEndpoint

from infranetes_common.wire import cri
from txgrpc import Call, Code, GrpcError, Server, Service
from txgrpc.service import Answer, Method

#: Field 1000, as a newer release might send it.
UNKNOWN = b"\xc2\x3e\x05newer"
#: RPCs that containerd 1.6 doesn't have.
NOT_IN_1_6 = frozenset(
    {
        "CheckpointContainer",
        "GetContainerEvents",
        "ListMetricDescriptors",
        "ListPodSandboxMetrics",
        "RuntimeConfig",
        "UpdatePodSandboxResources",
        *(f"Stream{what}" for what in ("PodSandboxes", "Containers", "ContainerStats", "PodSandboxStats")),
        "StreamPodSandboxMetrics",
        "StreamImages",
    }
)


def new_id() -> str:
    """Return an id like those of containerd and CRI-O: 64 hexadecimal digits."""
    return uuid.uuid4().hex + uuid.uuid4().hex


class FakeDelegate:
    """A runtime with pods, containers, images and events. After `down` it can be started again.

    :param old: whether it has only the RPCs of containerd 1.6.
    :ivar requests: the RPC and the bytes of each request, in order.
    :ivar answers: the test's own answers, by RPC: functions from the request's bytes to the response's.
    :ivar pages: the test's own messages of RPCs that stream, by RPC.
    :ivar errors: the errors with which RPCs fail, by RPC.
    """

    def __init__(self, path: str, old: bool = False) -> None:
        self.path = path
        self.old = old
        self.requests: list[tuple[str, bytes]] = []
        self.calls: list[Call] = []
        self.answers: dict[str, Callable[[bytes], bytes]] = {}
        self.pages: dict[str, list[bytes]] = {}
        self.errors: dict[str, GrpcError] = {}
        self.sandboxes: dict[str, cri.PodSandbox] = {}
        self.containers: dict[str, cri.Container] = {}
        self.images: dict[str, cri.Image] = {}
        self.handlers: list[str] = [] if old else ["", "runc"]
        self.listeners: list[Deferred[bytes | None]] = []
        self.hanging: dict[str, list[Deferred[None]]] = {}
        self.cancelled: list[str] = []
        self._server: Server | None = None
        self._port: Any = None  # Any: IListeningPort does not declare the Deferred of stopListening

    async def start(self) -> None:
        """Listen, with all pods, containers and images that it had before."""
        self._server = Server(reactor, [self._service(cri.RuntimeService), self._service(cri.ImageService)])
        self._port = await UNIXServerEndpoint(reactor, self.path).listen(self._server.factory)

    async def down(self) -> None:
        """End like a runtime that is killed: connections are lost in the middle of calls."""
        port, self._port = self._port, None
        if port is None:
            return
        await port.stopListening()
        assert self._server is not None
        for connection in list(self._server.connections):
            connection.abort("killed")
        if os.path.exists(self.path):
            os.unlink(self.path)

    def hang(self, rpc: str) -> None:
        """Make calls of an RPC hang for ever."""
        self.hanging[rpc] = []

    def names(self) -> list[str]:
        """The RPCs that were called, in order."""
        return [name for name, _ in self.requests]

    def tell(self, event: cri.ContainerEventResponse) -> None:
        """Send an event to every stream of GetContainerEvents."""
        listeners, self.listeners = self.listeners, []
        for each in listeners:
            each.callback(event.SerializeToString() + UNKNOWN)

    def end_events(self) -> None:
        """End every stream of GetContainerEvents."""
        listeners, self.listeners = self.listeners, []
        for each in listeners:
            each.callback(None)

    def add_sandbox(self, name: str = "theirs", **labels: str) -> str:
        """Add a pod that exists from the start, and return its id."""
        id = new_id()
        self.sandboxes[id] = cri.PodSandbox(
            id=id,
            metadata=cri.PodSandboxMetadata(name=name, uid=name, namespace="default"),
            labels={key.replace("__", "/").replace("_", "-"): value for key, value in labels.items()},
        )
        return id

    def _service(self, descriptor: Any) -> Service:  # Any: protobuf's descriptors have no common types
        answers: dict[Method, Answer] = {}
        for described in descriptor.methods:
            if self.old and described.name in NOT_IN_1_6:
                continue
            known = Method.from_descriptor(described)
            method = Method(known.name, known.path, Message, Message, False, known.server_streaming, raw=True)
            answers[method] = self._stream(known) if known.server_streaming else self._unary(known)
        return Service.of(descriptor.full_name, answers)

    def _unary(self, method: Method) -> Answer:
        async def answer(request: bytes, call: Call) -> bytes:
            await self._begin(method.name, request, call)
            made = self.answers.get(method.name)
            if made is not None:
                return made(request)
            does = getattr(self, f"_do_{method.name}", None)
            if does is None:
                return UNKNOWN
            response: Message = does(method.request_class.FromString(request))
            return response.SerializeToString() + UNKNOWN

        return answer

    def _stream(self, method: Method) -> Answer:
        async def answer(request: bytes, call: Call) -> AsyncIterator[bytes]:
            await self._begin(method.name, request, call)
            if method.name == "GetContainerEvents":
                while True:
                    waiting: Deferred[bytes | None] = Deferred(lambda _: self.cancelled.append(method.name))
                    self.listeners.append(waiting)
                    event = await waiting
                    if event is None:
                        return
                    yield event
            for page in self.pages.get(method.name, ()):
                yield page
            if method.name == "StreamPodSandboxes":
                for each in self.sandboxes.values():
                    yield cri.StreamPodSandboxesResponse(pod_sandboxes=[each]).SerializeToString()

        return answer

    async def _begin(self, rpc: str, request: bytes, call: Call) -> None:
        self.requests.append((rpc, request))
        self.calls.append(call)
        if rpc in self.errors:
            raise self.errors[rpc]
        if rpc in self.hanging:
            waiting: Deferred[None] = Deferred(lambda _: self.cancelled.append(rpc))
            self.hanging[rpc].append(waiting)
            await waiting

    def _find(self, known: dict[str, Any], id: str) -> Any:  # Any: sandboxes or containers
        found = [one for full, one in known.items() if full.startswith(id)]
        if len(found) != 1:
            raise GrpcError(Code.NOT_FOUND, f"an error occurred when try to find {id!r}: not found")
        return found[0]

    # The effects of some RPCs

    def _do_Version(self, request: cri.VersionRequest) -> cri.VersionResponse:
        version = "1.6.20" if self.old else "2.1.0"
        return cri.VersionResponse(
            version="0.1.0", runtime_name="containerd", runtime_version=version, runtime_api_version="v1"
        )

    def _do_Status(self, request: cri.StatusRequest) -> cri.StatusResponse:
        conditions = [
            cri.RuntimeCondition(type=kind, status=True) for kind in ("RuntimeReady", "NetworkReady")
        ]
        return cri.StatusResponse(
            status=cri.RuntimeStatus(conditions=conditions),
            runtime_handlers=[cri.RuntimeHandler(name=name) for name in self.handlers],
            info={"config": "{}"} if request.verbose else {},
        )

    def _do_RunPodSandbox(self, request: cri.RunPodSandboxRequest) -> cri.RunPodSandboxResponse:
        id = new_id()
        self.sandboxes[id] = cri.PodSandbox(
            id=id,
            metadata=request.config.metadata,
            labels=request.config.labels,
            runtime_handler=request.runtime_handler,
        )
        return cri.RunPodSandboxResponse(pod_sandbox_id=id)

    def _do_StopPodSandbox(self, request: cri.StopPodSandboxRequest) -> cri.StopPodSandboxResponse:
        if request.pod_sandbox_id in self.sandboxes:
            self.sandboxes[request.pod_sandbox_id].state = cri.SANDBOX_NOTREADY
        return cri.StopPodSandboxResponse()

    def _do_RemovePodSandbox(self, request: cri.RemovePodSandboxRequest) -> cri.RemovePodSandboxResponse:
        self.sandboxes.pop(request.pod_sandbox_id, None)
        return cri.RemovePodSandboxResponse()

    def _do_PodSandboxStatus(self, request: cri.PodSandboxStatusRequest) -> cri.PodSandboxStatusResponse:
        found = self._find(self.sandboxes, request.pod_sandbox_id)
        status = cri.PodSandboxStatus(id=found.id, metadata=found.metadata, state=found.state)
        return cri.PodSandboxStatusResponse(status=status)

    def _do_ListPodSandbox(self, request: cri.ListPodSandboxRequest) -> cri.ListPodSandboxResponse:
        return cri.ListPodSandboxResponse(items=self.sandboxes.values())

    def _do_ListPodSandboxStats(
        self, request: cri.ListPodSandboxStatsRequest
    ) -> cri.ListPodSandboxStatsResponse:
        stats = [
            cri.PodSandboxStats(attributes=cri.PodSandboxAttributes(id=one.id, labels=one.labels))
            for one in self.sandboxes.values()
        ]
        return cri.ListPodSandboxStatsResponse(stats=stats)

    def _do_ContainerStatus(self, request: cri.ContainerStatusRequest) -> cri.ContainerStatusResponse:
        found = self._find(self.containers, request.container_id)
        return cri.ContainerStatusResponse(status=cri.ContainerStatus(id=found.id))

    def _do_ListContainers(self, request: cri.ListContainersRequest) -> cri.ListContainersResponse:
        return cri.ListContainersResponse(containers=self.containers.values())

    def _do_ListImages(self, request: cri.ListImagesRequest) -> cri.ListImagesResponse:
        return cri.ListImagesResponse(images=self.images.values())

    def _do_ListMetricDescriptors(
        self, request: cri.ListMetricDescriptorsRequest
    ) -> cri.ListMetricDescriptorsResponse:
        descriptors = [cri.MetricDescriptor(name="container_cpu_usage_seconds_total", help="theirs")]
        return cri.ListMetricDescriptorsResponse(descriptors=descriptors)
