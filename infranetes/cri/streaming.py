"""The calls that answer with the URL of a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from infranetes.cri import validate
from infranetes.pods.streams import Streams
from infranetes_common import cri
from infranetes_common.errors import InvalidArgument

Url = Callable[[str, Any], str]
"""`url(kind, request)`: see `infranetes.streaming.server.StreamingServer.url`."""

MAX_PORTS = 256


class StreamingCalls:
    """Exec, Attach and PortForward. A container may be named by the first characters of its id: the URL
    stands for the container that this is now."""

    def __init__(self, streams: Streams, url: Url) -> None:
        self._streams = streams
        self._url = url

    async def Exec(self, request: cri.ExecRequest, call: Any) -> cri.ExecResponse:
        validate.command(request.cmd)
        request.container_id = self._streams.container(request.container_id).id
        return cri.ExecResponse(url=self._url("exec", request))

    async def Attach(self, request: cri.AttachRequest, call: Any) -> cri.AttachResponse:
        request.container_id = self._streams.container(request.container_id).id
        return cri.AttachResponse(url=self._url("attach", request))

    async def PortForward(self, request: cri.PortForwardRequest, call: Any) -> cri.PortForwardResponse:
        if len(request.port) > MAX_PORTS:
            raise InvalidArgument(f"port: more than {MAX_PORTS} ports in one request")
        request.pod_sandbox_id = self._streams.sandbox(request.pod_sandbox_id).id
        return cri.PortForwardResponse(url=self._url("portforward", request))
