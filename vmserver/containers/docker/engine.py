# SPDX-License-Identifier: Apache-2.0
"""A client of Docker's Engine API over its unix socket.

It uses Twisted's HTTP client, so that no call takes a thread: long ones (events, exec, load, a stop with its
grace period) cost a connection each and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import quote, urlencode

from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.error import ConnectError, ConnectionClosed
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.logger import Logger
from twisted.web._newclient import RequestNotSent
from twisted.web.client import (
    URI,
    Agent,
    HTTPConnectionPool,
    RequestGenerationFailed,
    RequestTransmissionFailed,
    ResponseFailed,
    ResponseNeverReceived,
)
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgentEndpointFactory, IBodyProducer, IResponse
from zope.interface import implementer

from infranetes_common.concurrency import Coro, cancellable, deferred, sleep, start
from infranetes_common.errors import (
    AlreadyExists,
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.reactors import IReactor
from vmserver.containers.docker.api import (
    ContainerInspect,
    ContainerSummary,
    ExecInspect,
    ImageInspect,
    ImageSummary,
    Request,
)
from vmserver.containers.docker.bodies import ByteStream, JsonBody, StreamBody, read_body
from vmserver.containers.docker.early_answers import ReadingEndpoint

API = "/v1.41"
CONNECT_SECONDS = 5.0
CLOSE_SECONDS = 2.0
CALL_SECONDS = 60.0  # Docker in an emulated VM is slow
_log = Logger()
_BROKEN = (
    ConnectError,
    ConnectionClosed,
    RequestGenerationFailed,
    RequestNotSent,
    RequestTransmissionFailed,
    ResponseFailed,
    ResponseNeverReceived,
)
_KINDS: dict[int, type[InfranetesError]] = {
    400: InvalidArgument,
    404: NotFound,
    409: FailedPrecondition,
}

T = TypeVar("T")


class EngineError(Exception):
    """The engine refused a request. :ivar status: the HTTP status. :ivar message: the engine's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message

    def translated(self, what: str) -> InfranetesError:
        """Return it as one of our errors. :param what: what was attempted, for the message."""
        kind = _KINDS.get(self.status, Unavailable)
        if "no space left on device" in self.message or "disk quota exceeded" in self.message:
            kind = ResourceExhausted
        if kind is FailedPrecondition and "is already in use by container" in self.message:
            kind = AlreadyExists
        return kind(f"{what}: Docker says: {self.message}")


@implementer(IAgentEndpointFactory)
class _UnixSocket:
    def __init__(self, endpoint: IStreamClientEndpoint) -> None:
        self._endpoint = endpoint

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:
        return self._endpoint


class Engine:
    """A Docker engine.

    Every method raises `Unavailable` when the engine can't be reached or does not answer, and
    `EngineError` when it refuses.
    """

    def __init__(self, reactor: IReactor, socket: Path) -> None:
        self._reactor = reactor
        self._socket = socket
        self._pool = HTTPConnectionPool(reactor, persistent=True)
        self._pool.maxPersistentPerHost = 4
        self._pending: set[Deferred[Any]] = set()  # Any: results of every kind
        self._closed = False
        endpoint = UNIXClientEndpoint(reactor, str(socket), timeout=CONNECT_SECONDS)
        self._agent = Agent.usingEndpointFactory(reactor, _UnixSocket(endpoint), self._pool)
        self._uploads = Agent.usingEndpointFactory(reactor, _UnixSocket(ReadingEndpoint(endpoint)))

    @deferred
    async def close(self) -> None:
        """Cancel pending calls, refuse later ones and close every connection. Idempotent."""
        self._closed = True
        for call in list(self._pending):
            call.cancel()
        await sleep(self._reactor, 0)  # cancelled calls close their connections in the next turn
        closing: Deferred[None] = self._pool.closeCachedConnections()
        closing.addTimeout(CLOSE_SECONDS, self._reactor)
        try:
            await closing
        except TimeoutError:
            _log.warn(
                "connections to Docker's engine did not close within {seconds} s", seconds=CLOSE_SECONDS
            )

    def run_in_background(self, work: Coro[None]) -> None:
        """Run `work` without waiting for it. `close` cancels it; errors are logged."""
        running = start(work)
        self._pending.add(running)
        running.addErrback(lambda failure: failure.trap(CancelledError))
        running.addErrback(lambda failure: _log.failure("background work for Docker failed", failure))
        running.addBoth(lambda _: self._pending.discard(running))

    # Typed calls

    async def inspect_container(self, name: str) -> ContainerInspect:
        """Return the engine's description of a container."""
        return cast(ContainerInspect, await self.call("GET", f"/containers/{name}/json"))

    async def list_containers(self, label: str) -> list[ContainerSummary]:
        """Return all containers with a label, whether they run or not."""
        query = {"all": "1", "filters": {"label": [label]}}
        return cast(list[ContainerSummary], await self.call("GET", "/containers/json", query))

    async def inspect_image(self, image_id: str) -> ImageInspect:
        """Return the engine's description of an image."""
        return cast(ImageInspect, await self.call("GET", f"/images/{image_id}/json"))

    async def list_images(self) -> list[ImageSummary]:
        """Return all images."""
        return cast(list[ImageSummary], await self.call("GET", "/images/json"))

    async def create_exec(self, container: str, body: Request) -> str:
        """Prepare a command in a container; return the id of the exec."""
        return str((await self.call("POST", f"/containers/{container}/exec", body=body))["Id"])

    async def inspect_exec(self, exec_id: str) -> ExecInspect:
        """Return the engine's description of an exec."""
        return cast(ExecInspect, await self.call("GET", f"/exec/{exec_id}/json"))

    # HTTP

    async def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, object] | None = None,
        body: Request | None = None,
        within: float = CALL_SECONDS,
    ) -> Any:  # Any: JSON, which the typed calls above cast
        """Send a request and return the answer's JSON; None if it is empty.

        :param query: values that are not strings are sent as JSON.
        :param within: seconds to wait for the whole answer; 0 for no limit."""

        async def exchange() -> tuple[int, bytes]:
            response = await self._send(method, path, query, None if body is None else JsonBody(body))
            return response.code, await read_body(response)

        status, text = await self._within(within, exchange(), f"{method} {path}")
        if status >= 400:
            raise EngineError(status, error_message(text))
        return json.loads(text) if text.strip() else None

    async def stream(
        self,
        method: str,
        path: str,
        query: Mapping[str, object] | None = None,
        body: Request | StreamBody | None = None,
        within: float = CALL_SECONDS,
    ) -> ByteStream:
        """Send a request and return the answer's body while it arrives. The caller closes it.

        :param within: seconds until the answer has to begin."""
        producer = JsonBody(body) if isinstance(body, dict) else body

        async def begin() -> tuple[IResponse, bytes]:
            response = await self._send(method, path, query, producer)
            return response, (await read_body(response) if response.code >= 400 else b"")

        response, refusal = await self._within(within, begin(), f"{method} {path}")
        if response.code >= 400:
            raise EngineError(response.code, error_message(refusal))
        stream = ByteStream()
        response.deliverBody(stream)
        return stream

    async def _send(
        self, method: str, path: str, query: Mapping[str, object] | None, body: IBodyProducer | None
    ) -> IResponse:
        parameters = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in (query or {}).items()
        }
        uri = f"http://docker{API}{quote(path)}" + (f"?{urlencode(parameters)}" if parameters else "")
        headers = Headers({"Host": ["docker"]})
        if body is not None:
            kind = "application/json" if isinstance(body, JsonBody) else "application/x-tar"
            headers.addRawHeader("Content-Type", kind)
        agent = self._uploads if isinstance(body, StreamBody) else self._agent
        response: IResponse = await agent.request(method.encode(), uri.encode(), headers, body)
        return response

    async def _within(self, seconds: float, work: Coro[T], what: str) -> T:
        if self._closed:
            work.close()
            raise Unavailable(f"the agent is stopping: no {what} is sent to Docker's engine")
        pending = start(cancellable(work))
        if seconds:
            pending.addTimeout(seconds, self._reactor)
        self._pending.add(pending)
        try:
            return await pending
        except TimeoutError:
            raise Unavailable(
                f"Docker's engine did not answer {what} within {seconds:g} s; {self._advice}"
            ) from None
        except _BROKEN as error:
            raise Unavailable(
                f"Docker's engine can't be reached: {_reason(error)}; {self._advice}"
            ) from error
        finally:
            self._pending.discard(pending)

    @property
    def _advice(self) -> str:
        return f"check the service docker in the VM and its socket {self._socket}"


def _reason(error: Exception) -> str:
    reasons = getattr(error, "reasons", None)
    return "; ".join(reason.getErrorMessage() for reason in reasons) if reasons else str(error)


def error_message(body: bytes) -> str:
    """Return the message in an error's body."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
