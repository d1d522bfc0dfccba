# SPDX-License-Identifier: Apache-2.0
"""One call of a client: from its request, over its stream, to its status."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from google.protobuf.message import Message
from h2.errors import ErrorCodes
from twisted.internet.interfaces import IDelayedCall

from txgrpc.framing import FramingError
from txgrpc.metadata import Headers, Metadata, decode_message, decode_metadata, encode_metadata
from txgrpc.service import Method
from txgrpc.states import Step, advance
from txgrpc.status import Code, GrpcError, code_for_http_status, code_for_reset
from txgrpc.stream import Stream
from txgrpc.timeout import encode_timeout
from txgrpc.timers import stop_timer

if TYPE_CHECKING:
    from txgrpc.channel import Channel, ClientConnection


Pairs = Iterable[tuple[str, str | bytes]]
"""Metadata: names and values."""


class CallOptions(NamedTuple):
    """The method to call and the options of the call; see :class:`~txgrpc.client.Options`."""

    channel: Channel
    method: Method
    timeout: float | None = None
    metadata: Pairs = ()
    wait_for_ready: bool = False


class Exchange:
    """A call from its request to its status, on whichever connection the channel has for it.

    Subclasses define what to send once a stream is open (``opened``) and what the end means (``closed``).
    """

    #: Whether everything sent can be sent again if the server has not processed it.
    replayable = False

    def __init__(self, options: CallOptions) -> None:
        channel, method, timeout, metadata, wait_for_ready = options
        self.channel = channel
        self.method = method
        self.metadata = encode_metadata(metadata)
        self._observed = None if channel.observer is None else channel.observer(method)
        if self._observed is not None:
            self.metadata += encode_metadata(self._observed.metadata)
        self.wait_for_ready = wait_for_ready
        self.stream: ClientStream | None = None
        self.done = False
        self.initial_metadata: Metadata = ()
        self.trailing_metadata: Metadata = ()
        self._replays = 1
        self._deadline: float | None = None
        self._clock: IDelayedCall | None = None
        if timeout is not None:
            self._deadline = channel.reactor.seconds() + timeout
            self._clock = channel.reactor.callLater(max(0.0, timeout), self._too_late)

    def begin(self, connection: ClientConnection) -> None:
        """Begin the call on a connection that has room for it."""
        headers = connection.channel.headers_for(self.method.path)
        if self._deadline is not None:
            headers.append((b"grpc-timeout", encode_timeout(self._deadline - self.channel.reactor.seconds())))
        self.stream = connection.begin(self, headers + self.metadata)
        self.opened(self.stream)

    def opened(self, stream: ClientStream) -> None:
        """Send the request, or begin to send the requests."""
        raise NotImplementedError

    def closed(self, error: GrpcError | None) -> None:
        """Report the end: `error`, or None for OK."""
        raise NotImplementedError

    def finish(self, error: GrpcError | None) -> None:
        """End the call with `error`, or None for OK. Only the first end counts."""
        if self.done:
            return
        self.done = True
        clock, self._clock = self._clock, None
        stop_timer(clock)
        observed, self._observed = self._observed, None
        if observed is not None:
            observed.ended(error, self.trailing_metadata)
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
        """End the call, or begin it anew: the server has certainly not processed it."""
        if self.replayable and self._replays and not self.done and not self.channel.closed:
            self._replays -= 1
            self.stream = None
            self.channel.submit(self)
        else:
            self.finish(error)

    def cancel(self) -> None:
        """Cancel the call, and the server's method with it. No effect after the end."""
        self.finish(GrpcError(Code.CANCELLED, "the call was cancelled by its caller"))

    def _too_late(self) -> None:
        self._clock = None
        self.finish(GrpcError(Code.DEADLINE_EXCEEDED, f"no answer to {self.method.path} in the time given"))

    def parse(self, payload: bytes) -> Message | bytes:
        """Return the response in `payload`; for a raw method, `payload` itself.

        :raise GrpcError: INTERNAL if it is not such a message, or the error of the channel's screen.
        """
        if self.channel.screen is not None:
            self.channel.screen.check(self.method, payload)
        if self.method.raw:
            return payload
        try:
            return self.method.response_class.FromString(payload)
        except Exception:  # DecodeError; its class differs between protobuf's implementations
            name = self.method.response_class.DESCRIPTOR.full_name
            raise GrpcError(Code.INTERNAL, f"the response is not a {name}") from None


class ClientStream(Stream):
    """The stream of one exchange."""

    __slots__ = ("_http_status", "exchange")

    def __init__(self, connection: ClientConnection, stream_id: int, exchange: Exchange) -> None:
        screen = exchange.channel.screen
        most = None if screen is None else screen.max_response(exchange.method)
        super().__init__(connection, stream_id, most)
        self.exchange = exchange
        self._http_status = 0

    def response_received(self, headers: Headers, ended: bool) -> None:
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
                Code.INTERNAL,
                f"the server compresses with {encoding.decode('latin-1')!r}, which was not asked for",
            )
        self.exchange.finish(problem)

    def trailers_received(self, headers: Headers) -> None:
        self._trailers(headers, dict(headers))

    def _trailers(self, headers: Headers, fields: dict[bytes, bytes]) -> None:
        self.receiving = advance(self.receiving, Step.END)
        self.connection.worked()
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
        """Report that the server's GOAWAY excludes the call."""
        self.over(error)
        self.exchange.unprocessed(error)


def _metadata(headers: Headers) -> Metadata:
    try:
        return decode_metadata(headers)
    except ValueError:
        return tuple(pair for pair in decode_metadata(h for h in headers if not h[0].endswith(b"-bin")))


def _not_grpc(fields: dict[bytes, bytes]) -> GrpcError | None:
    """Return the error of a response that is not gRPC; None if it is.

    Source: grpc/grpc doc/http-grpc-status-mapping.md."""
    status = fields.get(b":status", b"")
    content_type = fields.get(b"content-type", b"")
    if status == b"200" and content_type.startswith(b"application/grpc"):
        return None
    number = int(status) if status.isdigit() and len(status) == 3 else 0
    shown = content_type.decode("latin-1")[:80] or "no content type"
    return GrpcError(
        code_for_http_status(number), f"the server answered HTTP {number} with {shown}, which is not gRPC"
    )


def _status(fields: dict[bytes, bytes], metadata: Metadata) -> GrpcError | None:
    """Return the error that a response's last headers stand for; None for OK."""
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
