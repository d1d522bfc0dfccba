# SPDX-License-Identifier: Apache-2.0
"""The server: services behind a factory for any of Twisted's endpoints."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from h2.errors import ErrorCodes
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import (
    IAddress,
    IDelayedCall,
    IProtocolNegotiationFactory,
    IReactorTime,
)
from twisted.internet.protocol import Factory
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from txgrpc.connection import Connection, Phase
from txgrpc.http2 import LAST_STREAM_ID, goaway
from txgrpc.limits import Limits
from txgrpc.metadata import Headers
from txgrpc.servercall import Call, ServerStream
from txgrpc.service import Answer, Method, Service
from txgrpc.status import Code, GrpcError
from txgrpc.stream import Stream
from txgrpc.timers import stop_timer

if TYPE_CHECKING:
    from OpenSSL.crypto import X509

__all__ = ["Call", "Server"]

log = Logger()

Unknown = Callable[[str], tuple[Method, Answer] | None]
"""``unknown(path)`` returns a method and the function that answers it, or None if there is none."""

_DRAIN_PING = b"drain\0\0\0"


def unexpected(error: BaseException) -> GrpcError:
    """Return the status for an exception: its own, or INTERNAL with its class but not its text."""
    if isinstance(error, GrpcError):
        return error
    return GrpcError(Code.INTERNAL, f"unexpected {type(error).__name__} in the server")


class Server:
    """Answers the calls of `services` on every connection that its ``factory`` is given.

    :param reactor: for the clock. :param translate_error: the status for an exception of a method.
    :param keepalive: seconds of silence after which a client is asked with a PING whether it is
        there; None: never.
    :param unknown: returns the method for a path that no service has.
    :ivar factory: the factory for an endpoint to listen with. Under TLS it negotiates ``h2``.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        services: Iterable[Service],
        *,
        limits: Limits | None = None,
        translate_error: Callable[[BaseException], GrpcError] = unexpected,
        keepalive: float | None = 60.0,
        unknown: Unknown | None = None,
    ) -> None:
        self.reactor = reactor
        self.limits = limits or Limits()
        self.keepalive = keepalive
        self.connections: dict[ServerConnection, None] = {}  # the oldest first
        self.draining = False
        self.factory: Factory = _ServerFactory(self)
        self._translate = translate_error
        self._unknown = unknown
        self._drained: list[Deferred[None]] = []
        self._drain_timer: IDelayedCall | None = None
        self._services: set[str] = set()
        self._methods: dict[bytes, tuple[Method, Answer]] = {}
        for service in services:
            if service.name in self._services:
                raise ValueError(f"the service {service.name} is given twice")
            self._services.add(service.name)
            self._methods.update((entry[0].path.encode(), entry) for entry in service.answers.items())

    def find(self, path: bytes) -> tuple[Method, Answer]:
        """Return the method at `path` and the function that answers it.

        :raise GrpcError: UNIMPLEMENTED; says whether the service or the method is not offered.
        """
        entry = self._methods.get(path)
        if entry is not None:
            return entry
        found = None if self._unknown is None else self._unknown(path.decode("latin-1"))
        if found is not None:
            return found
        shown = path.decode("latin-1")[:200]
        service, _, name = shown.lstrip("/").partition("/")
        if service in self._services:
            raise GrpcError(Code.UNIMPLEMENTED, f"the service {service} does not offer {name} here")
        raise GrpcError(Code.UNIMPLEMENTED, f"there is no service for {shown} here")

    def translate(self, error: BaseException) -> GrpcError:
        """Return the status for an exception of a method, and log it if it was unexpected."""
        try:
            status = self._translate(error)
        except Exception:
            log.failure("The translation of an error failed")
            status = unexpected(error)
        if status is not error and status.code in (Code.INTERNAL, Code.UNKNOWN):
            log.failure("A method failed unexpectedly", failure=_failure(error))
        return status

    def drain(self, timeout: float) -> Deferred[None]:
        """Refuse new calls, give running calls `timeout` seconds to end, and close.

        Clients get a GOAWAY at once. A call that still runs after `timeout` is cancelled, and its client
        sees UNAVAILABLE. The Deferred fires when no connection is left. Close the listening port before
        you call this; a connection that is made meanwhile is closed.
        """
        self.draining = True
        if not self.connections:
            return succeed(None)
        drained: Deferred[None] = Deferred()
        self._drained.append(drained)
        if self._drain_timer is None:
            self._drain_timer = self.reactor.callLater(timeout, self._end)
        for connection in list(self.connections):
            connection.drain()
        return drained

    def _end(self) -> None:
        self._drain_timer = None
        for connection in list(self.connections):
            connection.shut_down()

    def make_room(self) -> bool:
        """Return whether there is room for one more connection, if need be after the end of one.

        The first that does without is the one with the lowest `worth`, and of several the oldest."""
        if len(self.connections) < self.limits.max_connections:
            return True
        least = min(self.connections, key=ServerConnection.worth)
        if least.worth() is Worth.WORKS:
            return False
        del self.connections[least]
        least.abort("the server has too many connections")
        return True

    def disconnected(self, connection: ServerConnection) -> None:
        """Forget a connection that is lost."""
        self.connections.pop(connection, None)
        if self._drained and not self.connections:
            timer, self._drain_timer = self._drain_timer, None
            stop_timer(timer)
            drained, self._drained = self._drained, []
            for each in drained:
                each.callback(None)


def _failure(error: BaseException) -> Failure:
    return Failure(error, type(error), error.__traceback__)


class Worth(enum.IntEnum):
    """What would be lost with a client's connection."""

    NOTHING = 0  # it has sent no SETTINGS yet, as real clients do at once; or it is closing
    SETTINGS = 1  # no more: it has not begun a call
    IDLE = 2  # no method runs for it, at most it is sending requests
    UNREAD = 3  # all methods that run for it wait until it reads
    WORKS = 4


@implementer(IProtocolNegotiationFactory)
class _ServerFactory(Factory):
    noisy = False

    def __init__(self, server: Server) -> None:
        self._server = server

    def acceptableProtocols(self) -> list[bytes]:
        return [b"h2"]

    def buildProtocol(self, addr: IAddress | None) -> ServerConnection | None:
        if self._server.draining or not self._server.make_room():
            return None
        return ServerConnection(self._server)


class ServerConnection(Connection):
    """One client's connection."""

    client_side = False

    def __init__(self, server: Server) -> None:
        super().__init__(server.reactor, server.limits, server.keepalive)
        self.server = server
        self.peer_certificate: X509 | None = None
        self.running = 0  # running methods, including those of cancelled calls
        self._last_stream_id = LAST_STREAM_ID

    def worth(self) -> Worth:
        """Return what would be lost with it."""
        if self.closed or self.phase is Phase.HANDSHAKE:
            return Worth.NOTHING
        if not self.h2.highest_inbound_stream_id:
            return Worth.SETTINGS
        if not self.running:
            return Worth.IDLE
        return Worth.UNREAD if self.sender.waiting >= self.running else Worth.WORKS

    def connectionMade(self) -> None:
        self.server.connections[self] = None
        super().connectionMade()

    def opened(self) -> None:
        # Kept here, since the transport drops it on closing, and methods may outlive that.
        get = getattr(self.transport, "getPeerCertificate", None)
        self.peer_certificate = None if get is None else get()

    def gone(self) -> None:
        self.server.disconnected(self)

    def request_received(self, stream_id: int, headers: Headers) -> None:
        if stream_id > self._last_stream_id or self.running >= self.limits.max_concurrent_streams:
            self.send_reset(stream_id, ErrorCodes.REFUSED_STREAM)
            self.wasted()
            return
        stream = ServerStream(self, stream_id)
        self.streams[stream_id] = stream
        stream.begin(headers)

    # To drain, send GOAWAY with the highest id, and a PING. Once the PING is answered, every stream that the
    # client began before it knew has arrived, and a second GOAWAY names the last one (RFC 9113, 6.8).

    def drain(self) -> None:
        """Tell the client to stop beginning calls, and close after the last one."""
        if self.phase is Phase.HANDSHAKE:
            self.close(ErrorCodes.NO_ERROR, "the server is shutting down")
        elif self.phase is Phase.OPEN:
            self.flush()
            self.phase = Phase.DRAINING
            self.transport.write(goaway(LAST_STREAM_ID, ErrorCodes.NO_ERROR, b"the server is shutting down"))
            self.h2.ping(_DRAIN_PING)
            self.flush()

    def pong(self, data: bytes) -> None:
        if data == _DRAIN_PING and self.phase is Phase.DRAINING and self._last_stream_id == LAST_STREAM_ID:
            self._last_stream_id = self.h2.highest_inbound_stream_id
            self.transport.write(
                goaway(self._last_stream_id, ErrorCodes.NO_ERROR, b"the server is shutting down")
            )
            self._close_if_drained()

    def stream_ended(self, stream: Stream) -> None:
        if self.phase is Phase.DRAINING:
            self._close_if_drained()

    def _close_if_drained(self) -> None:
        if self._last_stream_id != LAST_STREAM_ID and not self.streams:
            self.reactor.callLater(0, self.close, ErrorCodes.NO_ERROR, "the server is shutting down")

    def shut_down(self) -> None:
        """Cancel the calls that still run, and close: the time for draining is over."""
        for stream in list(self.streams.values()):
            if isinstance(stream, ServerStream):
                stream.stop(GrpcError(Code.UNAVAILABLE, "the server is shutting down"))
        self.close(ErrorCodes.NO_ERROR, "the server is shutting down")
