# SPDX-License-Identifier: Apache-2.0
"""The CRI's calls that answer with the URL of a stream."""

from __future__ import annotations

from collections.abc import Callable

from infranetes.cri import validate
from infranetes.pods.containers.lifelog import log_command
from infranetes.pods.streams import Streams
from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.wire import cri
from infranetes_common.wire.cri_rpcs import RuntimeStreamingRpcs
from txgrpc import Call

Url = Callable[[str, "cri.ExecRequest | cri.AttachRequest | cri.PortForwardRequest"], str]
"""`url(kind, request)`: see `infranetes.streaming.server.StreamingServer.url`."""

MAX_PORTS = 256


def no_url(kind: str, request: object) -> str:
    """Refuse the call, where there is no streaming server."""
    raise FailedPrecondition("no streams are served here")


class StreamingCalls(RuntimeStreamingRpcs):
    """Exec, Attach and PortForward.

    A request may name a prefix of an id: the URL is for the container or sandbox that has it now."""

    def __init__(self, streams: Streams, url: Url) -> None:
        self._streams = streams
        self._url = url

    async def Exec(self, request: cri.ExecRequest, call: Call) -> cri.ExecResponse:
        validate.command(request.cmd)
        container = self._streams.container(request.container_id)
        request.container_id = container.id
        log_command(container, list(request.cmd), "is to have a stream")
        return cri.ExecResponse(url=self._url("exec", request))

    async def Attach(self, request: cri.AttachRequest, call: Call) -> cri.AttachResponse:
        request.container_id = self._streams.container(request.container_id).id
        return cri.AttachResponse(url=self._url("attach", request))

    async def PortForward(self, request: cri.PortForwardRequest, call: Call) -> cri.PortForwardResponse:
        if len(request.port) > MAX_PORTS:
            raise InvalidArgument(f"port: more than {MAX_PORTS} ports in one request")
        request.pod_sandbox_id = self._streams.sandbox(request.pod_sandbox_id).id
        return cri.PortForwardResponse(url=self._url("portforward", request))
