# SPDX-License-Identifier: Apache-2.0
"""One call on the server: its headers are read, its method runs, its status is sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING

from google.protobuf.message import Message
from h2.errors import ErrorCodes
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IAddress, IDelayedCall
from twisted.logger import Logger

from txgrpc.framing import FramingError
from txgrpc.metadata import (
    Headers,
    Metadata,
    decode_metadata,
    encode_message,
    encode_metadata,
    header_list_size,
)
from txgrpc.peers import PeerCredentials, credentials_of
from txgrpc.service import Answer, Method
from txgrpc.states import State, Step, advance
from txgrpc.status import Code, GrpcError
from txgrpc.stream import Stream
from txgrpc.timeout import decode_timeout
from txgrpc.timers import stop_timer

if TYPE_CHECKING:
    from OpenSSL.crypto import X509

    from txgrpc.server import ServerConnection

log = Logger()

_STATUS_200 = (b":status", b"200")
_CONTENT_TYPE = (b"content-type", b"application/grpc")
_ACCEPT = (b"grpc-accept-encoding", b"identity")
_RESPONSE = [_STATUS_200, _CONTENT_TYPE]
_OK = (b"grpc-status", b"0")


class Call:
    """The call that a method answers.

    :ivar method: the path, ``/package.Service/Method``.
    :ivar deadline: when the caller gives up, in the reactor's seconds; None: never.
    :ivar cancelled: True if nobody waits for the answer: the caller has cancelled, its deadline has passed
        or its connection is lost. The method's coroutine is cancelled too.
    """

    __slots__ = (
        "_connection",
        "_headers",
        "_metadata",
        "_stream_id",
        "cancelled",
        "deadline",
        "method",
        "trailing",
    )

    def __init__(self, stream: ServerStream, method: str, headers: Headers) -> None:
        self.method = method
        self.deadline: float | None = None
        self.cancelled = False
        self.trailing: Headers = []
        # Not the stream itself, which refers to this call: ended calls must not be cyclic garbage.
        self._connection = stream.connection
        self._stream_id = stream.id
        self._headers = headers
        self._metadata: Metadata | None = None

    @property
    def metadata(self) -> Metadata:
        """The caller's metadata: pairs of name and value, which is bytes where the name ends in ``-bin``.

        :raise GrpcError: INVALID_ARGUMENT, a binary value is not base64.
        """
        if self._metadata is None:
            try:
                self._metadata = decode_metadata(self._headers)
            except ValueError as error:
                raise GrpcError(Code.INVALID_ARGUMENT, str(error)) from None
        return self._metadata

    @property
    def peer_certificate(self) -> X509 | None:
        """The certificate that the caller proved to hold; None without one."""
        return self._connection.peer_certificate

    @property
    def peer(self) -> IAddress:
        """The caller's address."""
        return self._connection.transport.getPeer()

    @property
    def peer_credentials(self) -> PeerCredentials | None:
        """The calling process, as the kernel reports it; None unless the call came over a unix socket."""
        return credentials_of(self._connection.transport)

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline, never below 0; None without a deadline."""
        if self.deadline is None:
            return None
        return max(0.0, self.deadline - float(self._connection.reactor.seconds()))

    def receive_ahead(self, size: int) -> None:
        """Accept up to `size` bytes of requests ahead of the method. Never lowers the previous size.

        For bulk data: a caller may send no more than this in one round trip. The server keeps that much in
        memory for the call while the method is busy. The connection's own window is the limit of all calls.
        """
        stream = self._connection.streams.get(self._stream_id)
        if stream is not None:
            stream.widen(size)

    def set_trailing_metadata(self, pairs: Iterable[tuple[str, str | bytes]]) -> None:
        """Send `pairs` along with the status.

        :raise ValueError: :raise TypeError: metadata can't be that.
        """
        self.trailing = encode_metadata(pairs)


class Requests:
    """The requests of a client-streaming call, in order."""

    __slots__ = ("_stream",)

    def __init__(self, stream: ServerStream) -> None:
        self._stream = stream

    def __aiter__(self) -> AsyncIterator[Message | bytes]:
        return self

    async def __anext__(self) -> Message | bytes:
        payload = await self._stream.receive()
        if payload is None:
            raise StopAsyncIteration
        return self._stream.parse(payload)


class ServerStream(Stream):
    """Runs one call's method."""

    __slots__ = ("_answer", "_deadline", "_running", "call", "method")

    connection: ServerConnection
    call: Call
    method: Method
    _answer: Answer

    def __init__(self, connection: ServerConnection, stream_id: int) -> None:
        super().__init__(connection, stream_id)
        self.receiving = State.OPEN
        self._deadline: IDelayedCall | None = None
        self._running: Deferred[None] | None = None

    def begin(self, headers: Headers) -> None:
        """Take in the request's headers: refuse it, or run the method as soon as possible."""
        fields = dict(headers)
        if fields.get(b":method") != b"POST":
            self._refuse_http(b"405", (b"allow", b"POST"))
            return
        if not _is_grpc(fields.get(b"content-type", b"")):
            self._refuse_http(b"415")
            return
        try:
            self._prepare(headers, fields)
        except GrpcError as error:
            self.finish(error)
            return
        if self.method.client_streaming:
            self._start()
        else:
            self.inbox.awaited = True

    def _prepare(self, headers: Headers, fields: dict[bytes, bytes]) -> None:
        server = self.connection.server
        self.method, self._answer = server.find(fields[b":path"])
        self.call = Call(self, self.method.path, headers)
        limit = self.connection.limits.max_header_list
        if header_list_size(headers) > limit:
            raise GrpcError(
                Code.RESOURCE_EXHAUSTED, f"the call's headers are over the limit of {limit} bytes"
            )
        encoding = fields.get(b"grpc-encoding", b"identity")
        if encoding != b"identity":
            self.call.trailing = [_ACCEPT]
            name = encoding.decode("latin-1")[:40]
            raise GrpcError(Code.UNIMPLEMENTED, f"messages compressed with {name!r} are not supported")
        timeout = fields.get(b"grpc-timeout")
        if timeout is not None:
            try:
                seconds = decode_timeout(timeout)
            except ValueError as error:
                raise GrpcError(Code.INTERNAL, str(error)) from None
            reactor = self.connection.reactor
            self.call.deadline = reactor.seconds() + seconds
            self._deadline = reactor.callLater(seconds, self._too_late)

    def _start(self) -> None:
        self.connection.running += 1
        running = Deferred.fromCoroutine(self._run())
        if not running.called:
            self._running = running
        running.addErrback(lambda failure: log.failure("A call's method ended badly", failure=failure))

    async def _run(self) -> None:
        status = None
        try:
            if self.method.client_streaming:
                result = self._answer(Requests(self), self.call)
            else:
                result = self._answer(self._only_request(), self.call)
            if self.method.server_streaming:
                await self._send_all(result)
            else:
                await self._send(await result)
        except CancelledError as error:
            if not self.call.cancelled:
                status = self.connection.server.translate(error)
        except Exception as error:
            status = self.connection.server.translate(error)
        finally:
            self.connection.running -= 1
            self._running = None
        if not self.call.cancelled:
            self.connection.worked()
            self.finish(status)

    def _only_request(self) -> Message | bytes:
        payload = self.inbox.take()
        if payload is None or len(self.inbox):
            raise GrpcError(Code.UNIMPLEMENTED, f"{self.method.path} takes exactly one request")
        return self.parse(payload)

    async def _send_all(self, responses: AsyncIterator[Message | bytes | list[Message | bytes]]) -> None:
        try:
            async for response in responses:
                await self._send(response)
        finally:
            close = getattr(responses, "aclose", None)
            if close is not None:
                await close()

    async def _send(self, response: Message | bytes | list[Message | bytes]) -> None:
        """Send one response, or a list of them as separate messages in as few frames as possible."""
        if self.call.cancelled:
            raise CancelledError
        if not isinstance(response, list):
            payloads = [self._serialized(response)]
        elif self.method.server_streaming:
            payloads = [self._serialized(one) for one in response]
        else:
            raise TypeError(f"{self.method.path} has one response")
        if self.sending is State.IDLE:
            self.send_headers(_RESPONSE)
        waiting = self.send(*payloads)
        if waiting is not None:
            await waiting

    def _serialized(self, response: Message | bytes) -> bytes:
        if isinstance(response, bytes):  # the method has serialized it
            return response
        if not self.method.raw and isinstance(response, self.method.response_class):
            return response.SerializeToString()
        raise TypeError(f"{self.method.path} answered with {type(response).__name__}")

    def parse(self, payload: bytes) -> Message | bytes:
        """Return the request in `payload`; of a raw method: `payload` itself.

        :raise GrpcError: INTERNAL, it is not one.
        """
        if self.method.raw:
            return payload
        try:
            return self.method.request_class.FromString(payload)
        except Exception:  # DecodeError; its class differs between protobuf's implementations
            raise GrpcError(
                Code.INTERNAL, f"the request is not a {self.method.request_class.DESCRIPTOR.full_name}"
            ) from None

    # The end: by the method, the clock, the caller or the connection

    def finish(self, status: GrpcError | None) -> None:
        """Send the status; None for OK."""
        self._stop_clock()
        if self.sending >= State.ENDED:
            return
        headers = [] if self.sending is State.OPEN else list(_RESPONSE)
        if status is None:
            headers.append(_OK)
        else:
            headers.append((b"grpc-status", b"%d" % status.code))
            if status.message:
                headers.append((b"grpc-message", encode_message(status.message)))
            headers += self._status_metadata(status)
        call = getattr(self, "call", None)
        if call is not None:
            headers += call.trailing
        self._end(headers)

    def _status_metadata(self, status: GrpcError) -> Headers:
        try:
            return encode_metadata(status.metadata)
        except (ValueError, TypeError):
            log.failure("The metadata of a status can't be sent")
            return []

    def _end(self, headers: Headers) -> None:
        self.send_trailers(headers)
        if self.receiving is State.OPEN:
            self.reset(ErrorCodes.NO_ERROR)  # the rest of the caller's requests is not read
        self.inbox.discard()

    def _refuse_http(self, status: bytes, *headers: tuple[bytes, bytes]) -> None:
        self._end([(b":status", status), *headers])

    def stop(self, status: GrpcError) -> None:
        """Cancel the method and tell the caller `status`."""
        self._cancel()
        self.finish(status)

    def _too_late(self) -> None:
        self._deadline = None
        self.stop(GrpcError(Code.DEADLINE_EXCEEDED, "the call's deadline has passed"))

    def _cancel(self) -> None:
        self._stop_clock()
        call = getattr(self, "call", None)
        if call is not None:
            call.cancelled = True
        running, self._running = self._running, None
        if running is not None:
            running.cancel()

    def _stop_clock(self) -> None:
        deadline, self._deadline = self._deadline, None
        stop_timer(deadline)

    # Reports of the connection

    def end_received(self) -> None:
        if self.inbox.partial:  # the method is not told of an end, which it would take for a proper one
            self.receiving = advance(self.receiving, Step.END)
            self.stop(GrpcError(Code.INTERNAL, "the request ends in the middle of a message"))
            return
        super().end_received()
        if not self.method.client_streaming:
            self._start()

    def refused(self, error: FramingError) -> None:
        self.connection.wasted()
        self.stop(GrpcError(error.code, error.message))

    def was_reset(self, error_code: int) -> None:
        self.abandon(GrpcError(Code.CANCELLED, "the caller has cancelled"))

    def abandon(self, error: GrpcError) -> None:
        self.sending = advance(self.sending, Step.RESET)
        self.receiving = advance(self.receiving, Step.RESET)
        self._cancel()  # before `over`, which wakes the method with another error than CancelledError
        self.over(error)


def _is_grpc(content_type: bytes) -> bool:
    return content_type == b"application/grpc" or content_type.startswith(
        (b"application/grpc+", b"application/grpc;")
    )
