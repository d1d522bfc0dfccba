"""One call of a client: the stub that makes it, its stream, and the handle of a streaming call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import ServiceDescriptor
from h2.errors import ErrorCodes
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from txgrpc.framing import FramingError
from txgrpc.metadata import Headers, Metadata, decode_message, decode_metadata, encode_metadata
from txgrpc.service import Method
from txgrpc.states import State, Step, advance
from txgrpc.status import Code, GrpcError, code_for_http_status, code_for_reset
from txgrpc.stream import Stream
from txgrpc.timeout import encode_timeout

if TYPE_CHECKING:
    from txgrpc.channel import Channel, ClientConnection

log = Logger()


class Exchange:
    """A call from being asked for to its status, over whichever connection the channel has for it.

    Subclasses say what is sent once a stream is open (``opened``) and what the end means (``closed``).
    """

    #: Whether all that was sent can be sent again, should the server not have looked at it.
    replayable = False

    def __init__(
        self,
        channel: Channel,
        method: Method,
        timeout: float | None,
        metadata: Iterable[tuple[str, str | bytes]],
        wait_for_ready: bool,
    ) -> None:
        self.channel = channel
        self.method = method
        self.metadata = encode_metadata(metadata)
        self.wait_for_ready = wait_for_ready
        self.stream: ClientStream | None = None
        self.done = False
        self.initial_metadata: Metadata = ()
        self.trailing_metadata: Metadata = ()
        self._replays = 1
        self._deadline: float | None = None
        self._clock: Any = None
        if timeout is not None:
            self._deadline = channel.reactor.seconds() + timeout
            self._clock = channel.reactor.callLater(max(0.0, timeout), self._too_late)

    def begin(self, connection: ClientConnection) -> None:
        """A connection has room for the call."""
        headers = connection.channel.headers_for(self.method.path)
        if self._deadline is not None:
            headers.append((b"grpc-timeout", encode_timeout(self._deadline - self.channel.reactor.seconds())))
        self.stream = connection.begin(self, headers + self.metadata)
        self.opened(self.stream)

    def opened(self, stream: ClientStream) -> None:
        """Send what there is to send."""
        raise NotImplementedError

    def closed(self, error: GrpcError | None) -> None:
        """The call has ended with `error`, or with OK."""
        raise NotImplementedError

    def finish(self, error: GrpcError | None) -> None:
        """End the call on our side with what is known now; a second end changes nothing."""
        if self.done:
            return
        self.done = True
        clock, self._clock = self._clock, None
        if clock is not None:
            clock.cancel()
        stream = self.stream
        if stream is None:
            self.channel.withdraw(self)
        else:
            stream.failure = error
            stream.reset(ErrorCodes.CANCEL if error is not None else ErrorCodes.NO_ERROR)
        self.closed(error)
        if stream is not None:
            stream.over(error)

    def unprocessed(self, error: GrpcError) -> None:
        """The server has certainly not looked at the call."""
        if self.replayable and self._replays and not self.done and not self.channel.closed:
            self._replays -= 1
            self.stream = None
            self.channel.submit(self)
        else:
            self.finish(error)

    def cancel(self) -> None:
        """Give the call up; the server's method is cancelled. No effect when it has ended."""
        self.finish(GrpcError(Code.CANCELLED, "the call was cancelled by its caller"))

    def _too_late(self) -> None:
        self._clock = None
        self.finish(GrpcError(Code.DEADLINE_EXCEEDED, f"no answer to {self.method.path} in the time given"))

    def parse(self, payload: bytes) -> Any:
        """The response in `payload`.

        :raise GrpcError: INTERNAL, it is not one.
        """
        try:
            return self.method.response_class.FromString(payload)
        except Exception:  # DecodeError; its class differs between protobuf's implementations
            name = self.method.response_class.DESCRIPTOR.full_name
            raise GrpcError(Code.INTERNAL, f"the response is not a {name}") from None


def serialize(method: Method, request: Any) -> bytes:
    """The bytes of `request`.

    :raise TypeError: it is not the method's request.
    """
    if not isinstance(request, method.request_class):
        raise TypeError(f"{method.path} takes {method.request_class}, not {type(request)}")
    payload: bytes = request.SerializeToString()
    return payload


class ClientStream(Stream):
    """The stream of one exchange."""

    __slots__ = ("_http_status", "exchange")

    def __init__(self, connection: ClientConnection, stream_id: int, exchange: Exchange) -> None:
        super().__init__(connection, stream_id)
        self.exchange = exchange
        self._http_status = 0

    def response_received(self, headers: Headers, ended: bool) -> None:
        """The response's headers; with `ended` they are its trailers too."""
        fields = dict(headers)
        if ended:
            self._trailers(headers, fields)
            return
        self.receiving = advance(self.receiving, Step.HEADERS)
        problem = _not_grpc(fields)
        if problem is None:
            encoding = fields.get(b"grpc-encoding", b"identity")
            if encoding == b"identity":
                self.exchange.initial_metadata = _metadata(headers)
                return
            problem = GrpcError(
                Code.INTERNAL, f"the server compresses with {encoding.decode('latin-1')!r}, unasked"
            )
        self.exchange.finish(problem)

    def trailers_received(self, headers: Headers) -> None:
        """The headers that end the response."""
        self._trailers(headers, dict(headers))

    def _trailers(self, headers: Headers, fields: dict[bytes, bytes]) -> None:
        self.receiving = advance(self.receiving, Step.END)
        exchange = self.exchange
        exchange.trailing_metadata = _metadata(headers)
        status = _status(fields, exchange.trailing_metadata)
        if status is None and self.inbox.partial:
            status = GrpcError(Code.INTERNAL, "the response ends in the middle of a message")
        exchange.finish(status)

    def end_received(self) -> None:
        super().end_received()
        self.exchange.finish(GrpcError(Code.INTERNAL, "the server ended the call without a status"))

    def refused(self, error: FramingError) -> None:
        self.exchange.finish(GrpcError(error.code, error.message))

    def was_reset(self, error_code: int) -> None:
        error = GrpcError(
            code_for_reset(error_code), f"the server reset the call (HTTP/2 error {error_code})"
        )
        self.over(error)
        if error_code == ErrorCodes.REFUSED_STREAM:
            self.exchange.unprocessed(error)
        else:
            self.exchange.finish(error)

    def abandon(self, error: GrpcError) -> None:
        self.over(error)
        self.exchange.finish(error)

    def never_seen(self, error: GrpcError) -> None:
        """The server's GOAWAY says that it did not look at the call."""
        self.over(error)
        self.exchange.unprocessed(error)


class _Result(Exchange):
    """A call with one response: `result` is its Deferred."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.result: Deferred[Any] = Deferred(lambda _: self.cancel())

    def closed(self, error: GrpcError | None) -> None:
        stream = self.stream
        try:
            if error is not None:
                raise error
            assert stream is not None  # only the server says OK
            payload = stream.inbox.take()
            if payload is None or len(stream.inbox):
                raise GrpcError(
                    Code.UNIMPLEMENTED, f"the server did not answer {self.method.path} exactly once"
                )
            response = self.parse(payload)
        except GrpcError as failed:
            self.result.errback(failed)
        else:
            self.result.callback(response)


class UnaryCall(_Result):
    """One request, one response."""

    replayable = True

    def __init__(self, payload: bytes, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._payload = payload

    def opened(self, stream: ClientStream) -> None:
        stream.inbox.wanted = True
        stream.send(self._payload, end=True)


class UploadCall(_Result):
    """Requests from an iterable, one response."""

    def __init__(self, requests: Any, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._requests = requests
        self._feeding: Deferred[None] | None = None

    def opened(self, stream: ClientStream) -> None:
        stream.inbox.wanted = True
        feeding = Deferred.fromCoroutine(self._feed(stream))
        if not feeding.called:
            self._feeding = feeding
        feeding.addErrback(self._feed_failed)

    async def _feed(self, stream: ClientStream) -> None:
        requests = self._requests
        try:
            if hasattr(requests, "__aiter__"):
                async for request in requests:
                    if not await self._feed_one(stream, request):
                        return
            else:
                for request in requests:
                    if not await self._feed_one(stream, request):
                        return
        finally:
            self._feeding = None
            close = getattr(requests, "aclose", None)
            if close is not None:
                await close()
        if not self.done:
            stream.send_end()

    async def _feed_one(self, stream: ClientStream, request: Any) -> bool:
        if self.done:
            return False
        waiting = stream.send(serialize(self.method, request))
        if waiting is not None:
            await waiting
        return not self.done

    def _feed_failed(self, failure: Failure) -> None:
        if self.done:
            if failure.check(CancelledError) is None:
                log.failure("The requests of an ended call failed", failure=failure)
            return
        # The caller's own iterable failed: that is what the caller gets to see.
        result, self.result = self.result, Deferred()
        self.result.addErrback(lambda _: None)
        self.cancel()
        result.errback(failure)

    def closed(self, error: GrpcError | None) -> None:
        feeding, self._feeding = self._feeding, None
        if feeding is not None:
            feeding.cancel()
        super().closed(error)


class StreamCall(Exchange):
    """A call whose responses are a stream: iterate with ``async for``; its failure is raised there.

    A call that is not read to its end goes on until it is cancelled: leave early with :meth:`cancel`,
    or use it as ``async with stub.Watch(request) as call``.

    :ivar initial_metadata: what came with the response's headers. :ivar trailing_metadata: what came
        with the status.
    """

    def __init__(self, payload: bytes | None, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._payload = payload
        self.replayable = payload is not None
        self._failure: GrpcError | None = None
        self._opening: list[Deferred[None]] = []

    def opened(self, stream: ClientStream) -> None:
        if self._payload is not None:
            stream.send(self._payload, end=True)
        self._wake()

    def closed(self, error: GrpcError | None) -> None:
        self._failure = error
        self._wake()

    def _wake(self) -> None:
        opening, self._opening = self._opening, []
        for waiter in opening:
            waiter.callback(None)

    async def _open(self) -> ClientStream:
        while self.stream is None:
            if self._failure is not None:
                raise self._failure
            waiter: Deferred[None] = Deferred(self._opening.remove)
            self._opening.append(waiter)
            await waiter
        return self.stream

    async def send(self, request: Any) -> None:
        """Send one request of a bidirectional call; returns when the next may follow.

        :raise GrpcError: the call has ended; with OK from the server, the code is CANCELLED.
        """
        if not self.method.client_streaming:
            raise TypeError(f"{self.method.path} takes one request, which is sent already")
        payload = serialize(self.method, request)
        stream = await self._open()
        self._check_live()
        waiting = stream.send(payload)
        if waiting is not None:
            try:
                await waiting
            except CancelledError:
                self._check_live()
                raise

    async def done_sending(self) -> None:
        """Tell the server that no request follows. No effect when the call has ended."""
        stream = await self._open()
        if not self.done and stream.sending is State.OPEN:
            waiting = stream.send_end()
            if waiting is not None:
                await waiting

    def _check_live(self) -> None:
        if self.done:
            raise self._failure or GrpcError(Code.CANCELLED, "the server has ended the call")

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        stream = await self._open()
        while True:
            payload = await stream.receive()
            if stream is self.stream:
                break
            stream = await self._open()
        if payload is None:
            raise StopAsyncIteration
        try:
            return self.parse(payload)
        except GrpcError as error:
            self.finish(error)
            raise

    async def __aenter__(self) -> StreamCall:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class Stub:
    """A remote service: one method per RPC, named as in the descriptor.

    Each takes the request (a client-streaming RPC: an iterable of them, sync or async; a bidirectional
    one: nothing) and the keywords ``timeout`` (seconds; None: no deadline), ``metadata`` (pairs) and
    ``wait_for_ready`` (wait, within the timeout, for a server that can't be reached yet). An RPC with
    one response gives a Deferred of it, which may be cancelled; the others a :class:`StreamCall`.
    """

    def __init__(self, channel: Channel, descriptor: ServiceDescriptor) -> None:
        for described in descriptor.methods:
            setattr(self, described.name, _caller(channel, Method.from_descriptor(described)))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the service has no method {name}")


def _caller(channel: Channel, method: Method) -> Any:
    def options(
        timeout: float | None = None,
        metadata: Iterable[tuple[str, str | bytes]] = (),
        wait_for_ready: bool = False,
    ) -> tuple[Any, ...]:
        return channel, method, timeout, metadata, wait_for_ready

    def unary(request: Any, **keywords: Any) -> Deferred[Any]:
        call = UnaryCall(serialize(method, request), *options(**keywords))
        channel.submit(call)
        return call.result

    def upload(requests: Any, **keywords: Any) -> Deferred[Any]:
        call = UploadCall(requests, *options(**keywords))
        channel.submit(call)
        return call.result

    def download(request: Any, **keywords: Any) -> StreamCall:
        call = StreamCall(serialize(method, request), *options(**keywords))
        channel.submit(call)
        return call

    def bidirectional(**keywords: Any) -> StreamCall:
        call = StreamCall(None, *options(**keywords))
        channel.submit(call)
        return call

    if method.server_streaming:
        return bidirectional if method.client_streaming else download
    return upload if method.client_streaming else unary


def _metadata(headers: Headers) -> Metadata:
    try:
        return decode_metadata(headers)
    except ValueError:
        return tuple(pair for pair in decode_metadata(h for h in headers if not h[0].endswith(b"-bin")))


def _not_grpc(fields: dict[bytes, bytes]) -> GrpcError | None:
    """The error of a response that is not gRPC (grpc/grpc doc/http-grpc-status-mapping.md)."""
    status = fields.get(b":status", b"")
    content_type = fields.get(b"content-type", b"")
    if status == b"200" and content_type.startswith(b"application/grpc"):
        return None
    number = int(status) if status.isdigit() else 0
    shown = content_type.decode("latin-1")[:80] or "no content type"
    return GrpcError(
        code_for_http_status(number), f"the server answered HTTP {number} with {shown}, which is not gRPC"
    )


def _status(fields: dict[bytes, bytes], metadata: Metadata) -> GrpcError | None:
    """The error that a response's last headers stand for; None: OK."""
    value = fields.get(b"grpc-status")
    if value is None:
        if b":status" in fields:
            problem = _not_grpc(fields)
            if problem is not None:
                return problem
        return GrpcError(Code.UNKNOWN, "the server ended the call without a status", metadata)
    if value == b"0":
        return None
    message = decode_message(fields.get(b"grpc-message", b""))
    try:
        code = Code(int(value))
    except ValueError:
        shown = value.decode("latin-1")[:20]
        return GrpcError(Code.UNKNOWN, f"the server answered with the status {shown!r}: {message}", metadata)
    return None if code is Code.OK else GrpcError(code, message, metadata)
