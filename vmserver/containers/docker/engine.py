"""Docker's Engine API over its unix socket, on Twisted's own HTTP client.

Source: Docker Engine API v1.41 (Docker 20.10), https://docs.docker.com/engine/api/v1.41/. The
client is native to the reactor: no call takes a thread, so long ones (events, exec, load, a stop
with its grace) cost a connection each and nothing else.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from twisted.internet.defer import CancelledError, Deferred, TimeoutError, succeed
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.error import ConnectError, ConnectionClosed
from twisted.internet.protocol import Protocol
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web._newclient import RequestNotSent
from twisted.web.client import (
    Agent,
    HTTPConnectionPool,
    RequestGenerationFailed,
    RequestTransmissionFailed,
    ResponseDone,
    ResponseFailed,
    ResponseNeverReceived,
    readBody,
)
from twisted.web.http import PotentialDataLoss
from twisted.web.http_headers import Headers
from twisted.web.iweb import UNKNOWN_LENGTH, IAgentEndpointFactory, IBodyProducer
from zope.interface import implementer

from infranetes_common.errors import (
    AlreadyExists,
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)

API = "/v1.41"
CONNECT_SECONDS = 5.0
CLOSE_SECONDS = 2.0
CALL_SECONDS = 60.0  # an emulated machine's Docker takes its time
_HIGH_WATER = 256 * 1024
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


class EngineError(Exception):
    """The engine refused a request. :ivar status: HTTP's. :ivar message: its words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message

    def translated(self, what: str) -> InfranetesError:
        """Our error for it; `what` says what was tried, and on what."""
        kind = _KINDS.get(self.status, Unavailable)
        if "no space left on device" in self.message or "disk quota exceeded" in self.message:
            kind = ResourceExhausted
        if kind is FailedPrecondition and "is already in use by container" in self.message:
            kind = AlreadyExists
        return kind(f"{what}: Docker says: {self.message}")


@implementer(IAgentEndpointFactory)
class _OneSocket:
    def __init__(self, reactor: Any, path: Path) -> None:
        self._endpoint = UNIXClientEndpoint(reactor, str(path), timeout=CONNECT_SECONDS)

    def endpointForURI(self, uri: Any) -> Any:
        return self._endpoint


class ByteStream(Protocol):
    """A response's body, read at the reader's pace."""

    transport: Any  # the response's IPushProducer

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._paused = False
        self._over: Failure | None = None
        self._wake: Deferred[None] | None = None

    def dataReceived(self, data: bytes) -> None:
        self._chunks.append(data)
        self._size += len(data)
        if self._size > _HIGH_WATER and not self._paused and self.transport is not None:
            self._paused = True
            self.transport.pauseProducing()
        self._notify()

    def connectionLost(self, reason: Failure = ResponseDone) -> None:  # type: ignore[assignment]
        self._over = reason
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None:
            wake, self._wake = self._wake, None
            wake.callback(None)

    async def read(self) -> bytes:
        """Some bytes; none at the end. :raise Unavailable: the connection broke."""
        while not self._chunks:
            if self._over is not None:
                if self._over.check(ResponseDone, PotentialDataLoss) is None:
                    raise Unavailable(f"Docker's engine broke off: {self._over.getErrorMessage()}")
                return b""
            self._wake = Deferred()
            await self._wake
        data = self._chunks.popleft()
        self._size -= len(data)
        if self._paused and self._size < _HIGH_WATER // 2 and self.transport is not None:
            self._paused = False
            self.transport.resumeProducing()
        return data

    def close(self) -> None:
        """End the exchange, whatever is still to come. Twice is once."""
        if self._over is None and self.transport is not None:
            self.transport.stopProducing()

    async def lines(self) -> AsyncIterator[bytes]:
        """The body line by line."""
        rest = b""
        while data := await self.read():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.strip():
                    yield line
        if rest.strip():
            yield rest


@implementer(IBodyProducer)
class _JsonBody:
    def __init__(self, value: Any) -> None:
        self._body = json.dumps(value).encode()
        self.length = len(self._body)

    def startProducing(self, consumer: Any) -> Deferred[None]:
        consumer.write(self._body)
        return succeed(None)

    def pauseProducing(self) -> None:
        """It is written at once."""

    def resumeProducing(self) -> None:
        """It is written at once."""

    def stopProducing(self) -> None:
        """It is written at once."""


@implementer(IBodyProducer)
class StreamBody:
    """A request's body from an async iterator, at the pace of the other side."""

    length = UNKNOWN_LENGTH

    def __init__(self, source: AsyncIterator[bytes]) -> None:
        self._source = source
        self._resume: Deferred[None] | None = None
        self._paused = False
        self._task: Deferred[None] | None = None
        self.failure: Failure | None = None  # of the source

    def startProducing(self, consumer: Any) -> Deferred[None]:
        self._task = Deferred.fromCoroutine(self._pump(consumer))
        return self._task

    async def _pump(self, consumer: Any) -> None:
        while True:
            if self._paused:
                self._resume = Deferred()
                await self._resume
            try:
                data = await anext(self._source, None)
            except CancelledError:
                raise
            except Exception:
                self.failure = Failure()
                raise
            if data is None:
                return
            consumer.write(data)

    def pauseProducing(self) -> None:
        self._paused = True

    def resumeProducing(self) -> None:
        self._paused = False
        if self._resume is not None:
            resume, self._resume = self._resume, None
            resume.callback(None)

    def stopProducing(self) -> None:
        if self._task is not None:
            self._task.addErrback(lambda failure: None)
            self._task.cancel()


class Engine:
    """One Docker engine.

    Every method raises `Unavailable` when the engine can't be reached or does not answer, and
    `EngineError` when it refuses.
    """

    def __init__(self, reactor: Any, socket: Path) -> None:
        self._reactor = reactor
        self._socket = socket
        self._pool = HTTPConnectionPool(reactor, persistent=True)
        self._pool.maxPersistentPerHost = 4
        self._under_way: set[Deferred[Any]] = set()
        self._closed = False
        self._agent = Agent.usingEndpointFactory(reactor, _OneSocket(reactor, socket), self._pool)

    def close(self) -> Deferred[None]:
        """End calls that are under way and close every connection; later calls are refused. Twice is once."""
        return Deferred.fromCoroutine(self._close())

    async def _close(self) -> None:
        self._closed = True
        for call in list(self._under_way):
            call.cancel()
        await deferLater(self._reactor, 0, lambda: None)  # connections end in the next turn
        closing: Deferred[None] = self._pool.closeCachedConnections()
        closing.addTimeout(CLOSE_SECONDS, self._reactor)
        try:
            await closing
        except TimeoutError:
            _log.warn(
                "connections to Docker's engine did not close within {seconds} s", seconds=CLOSE_SECONDS
            )

    async def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        within: float = CALL_SECONDS,
    ) -> Any:
        """The answer's JSON, or None where there is none. `within`: seconds for all of it."""

        async def whole() -> Any:
            response = await self._send(method, path, query, None if body is None else _JsonBody(body))
            return response.code, await readBody(response)

        status, text = await self._within(within, whole(), f"{method} {path}")
        if status >= 400:
            raise EngineError(status, _message(text))
        return json.loads(text) if text.strip() else None

    async def stream(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        within: float = CALL_SECONDS,
    ) -> ByteStream:
        """The answer's body as it comes. `within`: seconds for its beginning. The caller closes it."""
        producer = body if body is None or IBodyProducer.providedBy(body) else _JsonBody(body)

        async def begin() -> Any:
            response = await self._send(method, path, query, producer)
            return response, (await readBody(response) if response.code >= 400 else b"")

        response, refused = await self._within(within, begin(), f"{method} {path}")
        if response.code >= 400:
            raise EngineError(response.code, _message(refused))
        stream = ByteStream()
        response.deliverBody(stream)
        return stream

    async def _send(self, method: str, path: str, query: Mapping[str, Any] | None, body: Any) -> Any:
        parameters = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in (query or {}).items()
        }
        uri = f"http://docker{API}{quote(path)}" + (f"?{urlencode(parameters)}" if parameters else "")
        headers = Headers({"Host": ["docker"]})
        if body is not None:
            kind = "application/json" if isinstance(body, _JsonBody) else "application/x-tar"
            headers.addRawHeader("Content-Type", kind)
        return await self._agent.request(method.encode(), uri.encode(), headers, body)

    async def _within(self, seconds: float, work: Any, what: str) -> Any:
        if self._closed:
            work.close()
            raise Unavailable(f"the agent is about to end: Docker's engine is not asked to {what}")
        deferred: Deferred[Any] = Deferred.fromCoroutine(_cancellable(work))
        if seconds:
            deferred.addTimeout(seconds, self._reactor)
        self._under_way.add(deferred)
        try:
            return await deferred
        except TimeoutError:
            raise Unavailable(
                f"Docker's engine did not answer {what} within {seconds:g} s; {self._advice}"
            ) from None
        except _BROKEN as error:
            raise Unavailable(
                f"Docker's engine can't be reached: {_reason(error)}; {self._advice}"
            ) from error
        finally:
            self._under_way.discard(deferred)

    @property
    def _advice(self) -> str:
        return f"see to the service docker in the machine and its socket {self._socket}"


async def _cancellable(work: Any) -> Any:
    """`work`, whose cancellation is seen as one: the HTTP client wraps it in its own errors."""
    try:
        return await work
    except _BROKEN as error:
        if _was_cancelled(error):
            raise CancelledError() from error
        raise


def _was_cancelled(error: Any) -> bool:
    return any(
        reason.check(CancelledError) or _was_cancelled(reason.value)
        for reason in getattr(error, "reasons", ())
    )


def _reason(error: Exception) -> str:
    reasons = getattr(error, "reasons", None)
    return "; ".join(reason.getErrorMessage() for reason in reasons) if reasons else str(error)


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
