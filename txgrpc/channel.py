# SPDX-License-Identifier: Apache-2.0
"""The client's channel: a connection to one endpoint, made on demand and made again after it is lost.

A channel has at most one connection for new calls; draining connections keep their calls until these end.

===========  ==============================================================
state        a new call
===========  ==============================================================
idle         starts a connection attempt and waits for it
connecting   waits
ready        begins, or waits while the server's limit of streams is reached
backing off  fails with the last attempt's reason (``wait_for_ready``: waits)
closed       fails
===========  ==============================================================
"""

from __future__ import annotations

import random
from typing import Any

import attrs
from h2.errors import ErrorCodes
from twisted.internet.defer import Deferred, maybeDeferred, succeed
from twisted.internet.interfaces import (
    IAddress,
    IDelayedCall,
    IProtocol,
    IProtocolNegotiationFactory,
    IReactorTime,
    IStreamClientEndpoint,
)
from twisted.internet.protocol import Factory
from twisted.python.failure import Failure
from zope.interface import implementer

from txgrpc.connection import Connection, Phase
from txgrpc.exchange import ClientStream, Exchange
from txgrpc.limits import Limits
from txgrpc.metadata import Headers
from txgrpc.observer import Observer
from txgrpc.screen import Screen
from txgrpc.status import Code, Disconnected, GrpcError
from txgrpc.stream import Stream
from txgrpc.timers import stop_timer
from txgrpc.turns import Turns

# Bytes read at a time below TLS. TLS decrypts all of them at once, in records of maybe one byte each: with
# Twisted's 64 KiB, a hostile server can keep the reactor busy for 90 ms.
_READ_BYTES = 4 * 1024


@attrs.frozen
class Backoff:
    """Seconds between connection attempts: each `factor` times the one before, up to `most`.

    Each varies by the part `jitter`, so that the clients of a server that was away don't all come at once."""

    first: float = 0.2
    factor: float = 1.6
    most: float = 10.0
    jitter: float = 0.2

    def delay(self, failures: int) -> float:
        """Return the seconds to wait after so many failed attempts in a row, 1 or more."""
        plain = min(self.most, self.first * self.factor ** min(failures - 1, 64))
        return plain * random.uniform(1 - self.jitter, 1 + self.jitter)  # noqa: S311


class Channel:
    """Calls to the server behind `endpoint`, all on one connection.

    :param endpoint: an ``IStreamClientEndpoint``; under TLS, ``h2`` is negotiated.
    :param keepalive: seconds of silence during a call after which the server is asked with a PING
        whether it is there (``Limits.keepalive_timeout``: how long it has to answer); None: never.
    :param authority: the ``:authority`` that is sent to the server.
    :param connect_timeout: seconds for the endpoint to connect.
    :param screen: bounds the responses of a server that is not trusted; None: only `limits` bound them.
    :param observer: follows the calls, if not None.
    :ivar turns: shares the reactor between the handling of messages and everything else.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        endpoint: IStreamClientEndpoint,
        *,
        limits: Limits | None = None,
        keepalive: float | None = None,
        authority: str = "localhost",
        connect_timeout: float = 20.0,
        backoff: Backoff | None = None,
        screen: Screen | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.reactor = reactor
        self.limits = limits or Limits()
        self.screen = screen
        self.observer = observer
        self.turns = Turns(reactor)
        self.keepalive = keepalive
        self.closed = False
        self._endpoint = endpoint
        self._connect_timeout = connect_timeout
        self._backoff = backoff or Backoff()
        self._authority = authority.encode("ascii")
        self._connection: ClientConnection | None = None
        self._connecting = False  # until the peer's SETTINGS arrive
        self._attempt: Deferred[IProtocol] | None = None  # until the transport is connected
        self._live: set[ClientConnection] = set()
        self._waiting: dict[Exchange, None] = {}
        self._failures = 0
        self._reason = ""
        self._retry: IDelayedCall | None = None  # the backoff's timer
        self._closing: list[Deferred[None]] = []

    def close(self) -> Deferred[None]:
        """Cancel the calls in progress, close the connection, and fail every later call.

        :return: fires when the connection is gone.
        """
        self.closed = True
        retry, self._retry = self._retry, None
        stop_timer(retry)
        error = GrpcError(Code.CANCELLED, "the channel was closed")
        for exchange in list(self._waiting):
            exchange.finish(error)
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.cancel()
        for connection in list(self._live):
            connection.finish_all(error)
            if connection.phase is Phase.HANDSHAKE:  # the peer may never answer
                connection.abort("the channel was closed")
            else:
                connection.close(ErrorCodes.NO_ERROR, "the channel was closed")
        if not self._live:
            return succeed(None)
        closing: Deferred[None] = Deferred()
        self._closing.append(closing)
        return closing

    def reconnect(self) -> None:
        """Have the next call make a new connection. Those in progress fail as if theirs was lost."""
        for connection in list(self._live):
            connection.abort("the connection is made anew")
            self.retire(connection)  # at once: the next call does not wait until it is lost

    # Calls

    def headers_for(self, path: str) -> Headers:
        """Return the request headers that every call has."""
        return [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path.encode("ascii")),
            (b":authority", self._authority),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", b"grpc-python-txgrpc/1"),
            (b"grpc-accept-encoding", b"identity"),
        ]

    def submit(self, exchange: Exchange) -> None:
        """Begin the call, now or once there is a connection with room for it."""
        if exchange.done:
            return
        connection = self._connection
        if self.closed:
            exchange.finish(GrpcError(Code.CANCELLED, "the channel was closed"))
        elif connection is not None and connection.has_room and not self._waiting:
            exchange.begin(connection)
        elif self._retry is not None and not exchange.wait_for_ready:
            exchange.finish(Disconnected(self._reason))
        else:
            self._waiting[exchange] = None
            if connection is None and self._retry is None:
                self._connect()

    def withdraw(self, exchange: Exchange) -> None:
        """Forget a call that has ended before it began."""
        self._waiting.pop(exchange, None)

    def begin_waiting(self) -> None:
        """Begin as many waiting calls as the connection has room for."""
        while self._waiting and not self.closed:
            connection = self._connection
            if connection is None:
                if self._retry is None:
                    self._connect()
                return
            if not connection.has_room:
                return
            exchange = next(iter(self._waiting))
            del self._waiting[exchange]
            exchange.begin(connection)

    # The connection

    def _connect(self) -> None:
        if self._connecting or self.closed:
            return
        self._connecting = True
        attempt = self._attempt = maybeDeferred(self._endpoint.connect, _ClientFactory(self))
        timer = self.reactor.callLater(self._connect_timeout, attempt.cancel)

        def connected(_: IProtocol) -> None:
            self._attempt = None
            stop_timer(timer)

        def failed(failure: Failure) -> None:
            late = not timer.active()
            stop_timer(timer)
            if not self.closed:
                reason = f"no connection within {self._connect_timeout:g} s" if late else describe(failure)
                self._failed(reason)

        attempt.addCallbacks(connected, failed)

    def _failed(self, reason: str) -> None:
        """Fail the calls that wait, and try again later: an attempt has failed."""
        self._attempt = None
        self._connecting = False
        if self.closed:
            return
        self._failures += 1
        self._reason = f"can't connect: {reason}"
        self._retry = self.reactor.callLater(self._backoff.delay(self._failures), self._try_again)
        error = Disconnected(self._reason)
        for exchange in [waiting for waiting in self._waiting if not waiting.wait_for_ready]:
            exchange.finish(error)

    def _try_again(self) -> None:
        self._retry = None
        if self._waiting:
            self._connect()

    def made(self, connection: ClientConnection) -> None:
        """Adopt a connection whose transport is connected, though the peer has not spoken HTTP/2 yet."""
        self._live.add(connection)
        if self.closed:
            connection.abort("the channel was closed")

    def ready(self, connection: ClientConnection) -> None:
        """Begin calls on a connection from now on."""
        self._connecting = False
        self._failures = 0
        self._connection = connection
        self.begin_waiting()

    def retire(self, connection: ClientConnection) -> None:
        """Stop beginning calls on a connection."""
        if self._connection is connection:
            self._connection = None
            self.begin_waiting()

    def lost(self, connection: ClientConnection, was_ready: bool) -> None:
        """Forget a connection that is lost."""
        self._live.discard(connection)
        if not was_ready:
            self._failed(connection.reason)
        self.retire(connection)
        if self._closing and not self._live:
            closing, self._closing = self._closing, []
            for each in closing:
                each.callback(None)


@implementer(IProtocolNegotiationFactory)
class _ClientFactory(Factory):
    noisy = False

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def acceptableProtocols(self) -> list[bytes]:
        return [b"h2"]

    def buildProtocol(self, addr: IAddress | None) -> ClientConnection:
        return ClientConnection(self._channel)


class ClientConnection(Connection):
    """One connection of a channel."""

    client_side = True

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel.reactor, channel.limits, channel.keepalive)
        self.channel = channel
        self._was_ready = False

    @property
    def has_room(self) -> bool:
        """True if the server's limit on concurrent streams allows one more call."""
        return self.phase is Phase.OPEN and len(self.streams) < self.h2.remote_settings.max_concurrent_streams

    def connectionMade(self) -> None:
        # Older releases of Twisted set a factory's protocols too late for a TLS context's first connection.
        handle: Any = getattr(self.transport, "getHandle", lambda: None)()  # Any: a socket, or pyOpenSSL's
        if hasattr(handle, "set_alpn_protos"):
            handle.set_alpn_protos([b"h2"])
        below: Any = getattr(self.transport, "transport", None)  # Any: private to Twisted's TLS
        if hasattr(below, "bufferSize"):
            below.bufferSize = _READ_BYTES
        super().connectionMade()
        self.channel.made(self)

    def opened(self) -> None:
        self._was_ready = True
        self.channel.ready(self)

    def settings_changed(self) -> None:
        self.channel.begin_waiting()  # it may take more calls than before

    def gone(self) -> None:
        self.channel.lost(self, self._was_ready)

    def wants_keepalive(self) -> bool:
        return bool(self.streams)

    def begin(self, exchange: Exchange, headers: Headers) -> ClientStream:
        """Open a stream for `exchange` and send its headers."""
        stream_id = self.h2.get_next_available_stream_id()
        stream = ClientStream(self, stream_id, exchange)
        self.streams[stream_id] = stream
        stream.send_headers(headers)
        if stream_id >= self.h2.HIGHEST_ALLOWED_STREAM_ID - 2:
            self._retire()  # that was the last id
        return stream

    def goaway_received(self, error_code: int, last_stream_id: int, reason: bytes) -> None:
        why = reason.decode("utf-8", "replace")[:200] or f"HTTP/2 error {error_code}"
        error = Disconnected(f"the server takes no more calls on this connection: {why}")
        self._retire()
        for stream in [s for s in self.streams.values() if s.id > last_stream_id]:
            self.streams.pop(stream.id, None)
            self.sender.forget(stream)
            if isinstance(stream, ClientStream):
                stream.never_seen(error)
        self._close_if_drained()

    def _retire(self) -> None:
        if self.phase is Phase.OPEN:
            self.phase = Phase.DRAINING
            self.channel.retire(self)

    def stream_ended(self, stream: Stream) -> None:
        if self.phase is Phase.DRAINING:
            self._close_if_drained()
        elif self.channel._waiting:
            self.channel.begin_waiting()

    def _close_if_drained(self) -> None:
        if self.phase is Phase.DRAINING and not self.streams:
            self.reactor.callLater(0, self.close, ErrorCodes.NO_ERROR, self.reason)

    def finish_all(self, error: GrpcError) -> None:
        """End every call with `error`, on the server too."""
        for stream in list(self.streams.values()):
            if isinstance(stream, ClientStream):
                stream.exchange.finish(error)


def describe(failure: Failure) -> str:
    """Return in words why a connection could not be made."""
    return failure.getErrorMessage() or type(failure.value).__name__
