# SPDX-License-Identifier: Apache-2.0
"""The client's side of a call: the stub of a service, and the handle of a streaming call."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Generic, Required, Self, TypedDict, TypeVar, Unpack, cast

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from txgrpc.exchange import CallOptions, ClientStream, Exchange, Pairs
from txgrpc.service import Method
from txgrpc.states import State
from txgrpc.status import Code, GrpcError

if TYPE_CHECKING:
    from txgrpc.channel import Channel

RequestT = TypeVar("RequestT", bound=Message | bytes)
ResponseT = TypeVar("ResponseT", bound=Message | bytes)
Requests = Iterable[RequestT] | AsyncIterable[RequestT]

log = Logger()


def serialize(method: Method, request: Message | bytes) -> bytes:
    """Return the bytes of `request`, which is bytes already if the method is raw.

    :raise TypeError: it is not the method's request.
    """
    if method.raw and isinstance(request, bytes):
        return request
    if isinstance(request, bytes) or not isinstance(request, method.request_class):
        raise TypeError(f"{method.path} takes {method.request_class}, not {type(request)}")
    return request.SerializeToString()


class _Result(Exchange, Generic[ResponseT]):
    """A call with one response: `result` is its Deferred."""

    def __init__(self, options: CallOptions) -> None:
        super().__init__(options)
        #: Cleared when it fires, as is the stream, so that ended calls are not cyclic garbage.
        self.result: Deferred[ResponseT] | None = None

    def submit(self) -> Deferred[ResponseT]:
        """Begin the call and return its one response."""
        result: Deferred[ResponseT] = Deferred(lambda _: self.cancel())
        self.result = result
        self.channel.submit(self)
        return result

    def closed(self, error: GrpcError | None) -> None:
        stream, self.stream = self.stream, None
        result, self.result = self.result, None
        if result is None:
            return
        try:
            if error is not None:
                raise error
            assert stream is not None  # only the server sends OK
            payload = stream.inbox.take()
            if payload is None or len(stream.inbox):
                raise GrpcError(
                    Code.UNIMPLEMENTED, f"the server did not answer {self.method.path} exactly once"
                )
            response = self.parse(payload)
        except GrpcError as failed:
            result.errback(failed)
        else:
            result.callback(cast(ResponseT, response))


class UnaryCall(_Result[ResponseT]):
    """One request, one response."""

    replayable = True

    def __init__(self, payload: bytes, options: CallOptions) -> None:
        super().__init__(options)
        self._payload = payload

    def opened(self, stream: ClientStream) -> None:
        stream.inbox.awaited = True
        stream.send(self._payload, end=True)


class UploadCall(_Result[ResponseT], Generic[RequestT, ResponseT]):
    """Requests from an iterable, one response."""

    def __init__(self, requests: Requests[RequestT], options: CallOptions) -> None:
        super().__init__(options)
        self._requests = requests
        self._feeding: Deferred[None] | None = None

    def opened(self, stream: ClientStream) -> None:
        stream.inbox.awaited = True
        feeding = Deferred.fromCoroutine(self._feed(stream))
        if not feeding.called:
            self._feeding = feeding
        feeding.addErrback(self._feed_failed)

    async def _feed(self, stream: ClientStream) -> None:
        requests = self._requests
        try:
            if isinstance(requests, AsyncIterable):
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

    async def _feed_one(self, stream: ClientStream, request: RequestT) -> bool:
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
        if self.stream is not None and self.stream.failure is not None:
            return  # the stream ended while a request waited; its own error follows
        # The caller's own iterable failed, so the caller gets its error.
        result, self.result = self.result, None
        self.cancel()
        if result is not None:
            result.errback(failure)

    def closed(self, error: GrpcError | None) -> None:
        feeding, self._feeding = self._feeding, None
        if feeding is not None:
            feeding.cancel()
        super().closed(error)


class StreamCall(Exchange, Generic[RequestT, ResponseT]):
    """A call whose responses are a stream: iterate with ``async for``, which raises the call's failure.

    The type parameters are the request's class, for a bidirectional call, and the response's.

    A call that is not read to its end goes on until it is cancelled: leave early with :meth:`cancel`,
    or use it as ``async with stub.Watch(request) as call``.

    :ivar initial_metadata: from the response's headers. :ivar trailing_metadata: sent with the
        status.
    """

    def __init__(self, payload: bytes | None, options: CallOptions) -> None:
        super().__init__(options)
        self._payload = payload
        self.replayable = payload is not None
        self._failure: GrpcError | None = None
        self._opening: list[Deferred[None]] = []
        self._ahead = 0

    def receive_ahead(self, size: int) -> None:
        """Accept up to `size` bytes of responses ahead of the reader. Never lowers the previous size.

        For bulk data: a server may send no more than this in one round trip, and this side keeps that much in
        memory for the call.
        """
        self._ahead = max(self._ahead, size)
        if self.stream is not None:
            self.stream.widen(self._ahead)

    def opened(self, stream: ClientStream) -> None:
        stream.widen(self._ahead)
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

    async def send(self, request: RequestT) -> None:
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

    def __aiter__(self) -> AsyncIterator[ResponseT]:
        return self

    async def __anext__(self) -> ResponseT:
        stream = await self._open()
        while True:
            resting = self.channel.turns.rest() if stream.inbox else None
            if resting is not None:
                await resting
            payload = await stream.receive()
            if stream is self.stream:
                break
            stream = await self._open()
        if payload is None:
            raise StopAsyncIteration
        try:
            return cast(ResponseT, self.parse(payload))
        except GrpcError as error:
            self.finish(error)
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class Options(TypedDict, total=False):
    """How a call is made: each RPC of a stub takes these as keywords.

    ``timeout`` is in seconds (None: no deadline), ``metadata`` pairs of name and value. With
    ``wait_for_ready`` the call waits, within the timeout, for a server that can't be reached yet.
    """

    timeout: Required[float | None]
    metadata: Pairs
    wait_for_ready: bool


class _Rpc(Generic[RequestT, ResponseT]):
    """A method of a remote service, to be called. The type parameters are its request and its response."""

    __slots__ = ("_channel", "_method")

    def __init__(self, channel: Channel, method: Method) -> None:
        self._channel = channel
        self._method = method

    def _stream(self, payload: bytes | None, options: Options) -> StreamCall[RequestT, ResponseT]:
        call: StreamCall[RequestT, ResponseT] = StreamCall(
            payload, CallOptions(self._channel, self._method, **options)
        )
        self._channel.submit(call)
        return call


class Unary(_Rpc[RequestT, ResponseT]):
    """One request, one response. The Deferred may be cancelled."""

    __slots__ = ()

    def __call__(self, request: RequestT, **options: Unpack[Options]) -> Deferred[ResponseT]:
        payload = serialize(self._method, request)
        call: UnaryCall[ResponseT] = UnaryCall(payload, CallOptions(self._channel, self._method, **options))
        return call.submit()


class Upload(_Rpc[RequestT, ResponseT]):
    """Requests from an iterable, sync or async; one response. The Deferred may be cancelled."""

    __slots__ = ()

    def __call__(self, requests: Requests[RequestT], **options: Unpack[Options]) -> Deferred[ResponseT]:
        call: UploadCall[RequestT, ResponseT] = UploadCall(
            requests, CallOptions(self._channel, self._method, **options)
        )
        return call.submit()


class Download(_Rpc[RequestT, ResponseT]):
    """One request, a stream of responses."""

    __slots__ = ()

    def __call__(self, request: RequestT, **options: Unpack[Options]) -> StreamCall[RequestT, ResponseT]:
        return self._stream(serialize(self._method, request), options)


class Bidirectional(_Rpc[RequestT, ResponseT]):
    """A stream of requests, which are sent by the call, and one of responses."""

    __slots__ = ()

    def __call__(self, **options: Unpack[Options]) -> StreamCall[RequestT, ResponseT]:
        return self._stream(None, options)


_KINDS: Mapping[tuple[bool, bool], type[_Rpc[Message, Message]]] = {
    (False, False): Unary,
    (True, False): Upload,
    (False, True): Download,
    (True, True): Bidirectional,
}


class _Declared:
    """An RPC of a stub's class. Each use makes it anew: a stub that keeps its RPCs takes 5 KiB more."""

    __slots__ = ("_kind", "_method")

    def __init__(self, method: Method) -> None:
        self._kind = _KINDS[method.client_streaming, method.server_streaming]
        self._method = method

    def __get__(self, stub: Stub | None, owner: type[Stub]) -> object:
        return self if stub is None else self._kind(stub._channel, self._method)


class Stub:
    """A remote service on a channel. A subclass names it, and declares its RPCs by their kinds::

        class DemoStub(Stub):
            service = DESCRIPTOR.services_by_name["Demo"]
            Hello: Unary[HelloRequest, HelloResponse]
            Watch: Download[WatchRequest, WatchResponse]

    Each RPC takes the keywords of :class:`Options`.
    """

    service: ClassVar[ServiceDescriptor]

    def __init_subclass__(cls) -> None:
        for method in map(Method.from_descriptor, cls.service.methods):
            setattr(cls, method.name, _Declared(method))

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
