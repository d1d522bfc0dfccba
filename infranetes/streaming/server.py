# SPDX-License-Identifier: Apache-2.0
"""The daemon's HTTP server for streams. A CRI call answers with a URL, which a client may fetch once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import NoReturn, Protocol, cast

import h11
from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred, DeferredList, TimeoutError, maybeDeferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IAddress, IListeningPort, IReactorTime
from twisted.internet.protocol import Factory
from twisted.python.failure import Failure

from infranetes.machines.sessions import PortForwardCall, SessionCall
from infranetes.streaming import protocols
from infranetes.streaming.channels import Channel, ChannelClosed
from infranetes.streaming.connection import (
    Refused,
    StreamingConnection,
    accept_websocket,
    header_values,
    wants_websocket,
)
from infranetes.streaming.portforward import Forward, Pairs
from infranetes.streaming.protocols import Dialect
from infranetes.streaming.requests import StreamRequest, validate
from infranetes.streaming.sessions import (
    channel_names,
    command_start,
    forward,
    serve_command,
)
from infranetes.streaming.spdywire import SpdyWire
from infranetes.streaming.tokens import Tokens
from infranetes.streaming.tunnel import TunnelWire
from infranetes.streaming.websocketwire import WebSocketWire
from infranetes_common.concurrency import Coro
from infranetes_common.concurrency import start as run
from infranetes_common.crowding import one_too_many, source_of
from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri, vmserver

#: Seconds within which a client must open a session's streams, and for which a session may be idle.
STREAMS_TIMEOUT = 30.0
IDLE_TIMEOUT = 4 * 3600.0
#: The most connections at once. To one more, the oldest that has begun no session gives way, of the address
#: that has most of these.
MAX_CONNECTIONS = 1000

_KINDS = ("exec", "attach", "portforward")

Session = Coro[None]


class Agents(Protocol):
    """Makes the calls to the agent of the right VM; the caller begins each by its first message."""

    def exec_call(self, container_id: str) -> SessionCall:
        """Make the agent's Exec. :raise NotFound: no such container."""

    def attach_call(self, container_id: str) -> SessionCall:
        """Make the agent's Attach. :raise NotFound: no such container."""

    def port_forward_call(self, sandbox_id: str) -> PortForwardCall:
        """Make the agent's PortForward. :raise NotFound: no such sandbox."""


class StreamingServer(Factory):
    """Serves exec, attach and port-forward.

    :param host: an IP address of the node that kubelet reaches. :param port: 0: any that is free.
    """

    noisy = False

    def __init__(
        self,
        reactor: IReactor,
        agents: Agents,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str = "",
    ) -> None:
        self._reactor = reactor
        self._agents = agents
        self._endpoint = TCP4ServerEndpoint(reactor, port, interface=host)
        self._host, self._port = host, port
        self._advertise = advertise or host
        self._tokens: Tokens[StreamRequest] = Tokens(reactor)
        self._listening: IListeningPort | None = None
        self._connections: dict[StreamingConnection, str] = {}  # whom each counts as, the oldest first

    async def start(self) -> None:
        """Listen.

        :raise FailedPrecondition: the address can't be listened on."""
        try:
            self._listening = await self._endpoint.listen(self)
        except CannotListenError as error:
            raise FailedPrecondition(
                f"streaming.host, streaming.port: {self._host}:{self._port} can't be listened on: "
                f"{error.socketError}; give another port, or 0"
            ) from None

    async def stop(self) -> None:
        """Listen no more and cut every session. Idempotent."""
        listening, self._listening = self._listening, None
        if listening is not None:
            await maybeDeferred(listening.stopListening)
        for connection in list(self._connections):
            connection.abort()

    def url(self, kind: str, request: StreamRequest) -> str:
        """Return the URL that answers a CRI Exec, Attach or PortForward, for one use within a minute.

        :param kind: exec, attach or portforward.
        :raise InvalidArgument: the request asks for no stream, or for what can't be.
        :raise ResourceExhausted: too many URLs wait to be fetched.
        """
        if self._listening is None:
            raise FailedPrecondition("the streaming server is not running")
        validate(kind, request)
        token = self._tokens.issue(kind, request)
        port = cast(IPv4Address, self._listening.getHost()).port
        return f"http://{self._advertise}:{port}/{kind}/{token}"

    def buildProtocol(self, addr: IAddress | None) -> StreamingConnection | None:
        if len(self._connections) >= MAX_CONNECTIONS:
            idle = [each for each in self._connections if each.session is None]
            if not idle:
                return None
            oldest = one_too_many(idle, self._connections.__getitem__)
            del self._connections[oldest]
            oldest.abort()
        connection = StreamingConnection(self._reactor, self, IDLE_TIMEOUT)
        self._connections[connection] = source_of(addr)
        return connection

    # For a connection

    def ended(self, connection: StreamingConnection) -> None:
        """Forget a connection that is lost."""
        self._connections.pop(connection, None)

    def begin(self, connection: StreamingConnection, http: h11.Request) -> None:
        """Agree on an upgrade and run what the token stands for.

        :raise Refused: the error to answer with.
        """
        parts = http.target.decode("latin-1").split("?", 1)[0].split("/")
        if len(parts) != 3 or parts[1] not in _KINDS:
            raise Refused(HTTPStatus.NOT_FOUND, "there is nothing at this path")
        if http.method not in (b"GET", b"POST"):
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, "GET or POST is required", [("Allow", "GET, POST")])
        kind = parts[1]
        request = self._tokens.redeem(kind, parts[2])
        if request is None:
            raise Refused(
                HTTPStatus.NOT_FOUND, "the token is unknown, was used before, or is over a minute old"
            )
        if isinstance(request, cri.PortForwardRequest):
            session = self._begin_port_forward(connection, http, request)
        else:
            session = self._begin_command(connection, http, request)
        connection.run(run(session))

    # exec and attach

    def _begin_command(
        self, connection: StreamingConnection, http: h11.Request, request: cri.ExecRequest | cri.AttachRequest
    ) -> Session:
        start = command_start(request)
        is_exec = isinstance(request, cri.ExecRequest)
        begin = partial(self._agents.exec_call if is_exec else self._agents.attach_call, request.container_id)
        if wants_websocket(http):
            dialect = _websocket_dialect(http, protocols.COMMAND_WEBSOCKET)
            accepted = accept_websocket(http, dialect.name)
            wire = WebSocketWire(
                connection.flow,
                connection.write,
                ("stdin", "stdout", "stderr", "error", "resize"),
                base64_form=dialect.base64,
                close_signal=dialect.version >= 5,
                closed=connection.closed_by_client,
            )
            connection.wire = wire
            connection.upgrade("websocket", accepted)
            channels = {channel.name: channel for channel in wire.channels}
            return self._websocket_command(begin, start, channels, dialect.version)
        name = _spdy_protocol(http, protocols.COMMAND_SPDY)
        version = protocols.spdy_dialect(name).version
        gathering = _Gathering(self._reactor, channel_names(start, version))
        connection.wire = SpdyWire(connection.flow, connection.write, gathering.opened)
        connection.upgrade("SPDY/3.1", [("X-Stream-Protocol-Version", name)])
        return self._spdy_command(begin, start, gathering, version)

    async def _websocket_command(
        self,
        begin: Callable[[], SessionCall],
        start: vmserver.SessionStart,
        channels: dict[str, Channel],
        version: int,
    ) -> None:
        ready = channels["stdout" if start.stdout else "stderr" if start.stderr else "error"]
        await ready.write(b"")  # tells the client that the session has begun
        await serve_command(begin, start, channels, version)

    async def _spdy_command(
        self,
        begin: Callable[[], SessionCall],
        start: vmserver.SessionStart,
        gathering: _Gathering,
        version: int,
    ) -> None:
        try:
            channels = await gathering.complete
        except ChannelClosed:  # the client was too late; the connection ends with the session
            return
        await serve_command(begin, start, channels, version)

    # port-forward

    def _begin_port_forward(
        self, connection: StreamingConnection, http: h11.Request, request: cri.PortForwardRequest
    ) -> Session:
        def connect(port: int, data: Channel, error: Channel) -> Deferred[None]:
            begin = partial(self._agents.port_forward_call, request.pod_sandbox_id)
            return run(forward(begin, port, data, error))

        if not wants_websocket(http):
            name = _spdy_protocol(http, protocols.PORT_FORWARD_SPDY)
            pairs = Pairs(self._reactor, connect, STREAMS_TIMEOUT)
            connection.wire = SpdyWire(connection.flow, connection.write, pairs.opened)
            connection.upgrade("SPDY/3.1", [("X-Stream-Protocol-Version", name)])
            return _until_lost(pairs)
        dialect = _websocket_dialect(http, protocols.PORT_FORWARD_WEBSOCKET)
        accepted = accept_websocket(http, dialect.name)
        if dialect.name == protocols.TUNNEL:
            pairs = Pairs(self._reactor, connect, STREAMS_TIMEOUT)
            connection.wire = TunnelWire(
                connection.flow, connection.write, pairs.opened, connection.closed_by_client
            )
            connection.upgrade("websocket", accepted)
            return _until_lost(pairs)
        if not request.port:
            raise Refused(HTTPStatus.BAD_REQUEST, "the PortForward request named no port")
        wire = WebSocketWire(
            connection.flow,
            connection.write,
            ("data", "error") * len(request.port),
            base64_form=dialect.base64,
            close_signal=False,
            closed=connection.closed_by_client,
        )
        connection.wire = wire
        connection.upgrade("websocket", accepted)
        return _websocket_port_forward(list(request.port), wire.channels, connect)


async def _websocket_port_forward(ports: list[int], channels: list[Channel], connect: Forward) -> None:
    for number, port in enumerate(ports):
        for channel in channels[2 * number : 2 * number + 2]:
            await channel.write(port.to_bytes(2, "little"))
    running = [
        connect(port, channels[2 * number], channels[2 * number + 1]) for number, port in enumerate(ports)
    ]
    await DeferredList(running, consumeErrors=True)


async def _until_lost(pairs: Pairs) -> None:
    """Wait for the client to close the connection, which ends a port-forward and cancels this."""
    try:
        await Deferred()
    finally:
        pairs.stop()


class _Gathering:
    """Waits for a client to open the streams of its session.

    :ivar complete: fires with the channels by name, or fails with ChannelClosed if they come too late.
    """

    def __init__(self, clock: IReactorTime, names: list[str]) -> None:
        self._missing = set(names)
        self._channels: dict[str, Channel] = {}
        self.complete: Deferred[dict[str, Channel]] = Deferred()
        self.complete.addTimeout(STREAMS_TIMEOUT, clock)
        self.complete.addErrback(_late)

    def opened(self, channel: Channel) -> bool:
        """Decide on a stream that the client opens: whether it belongs to the session."""
        if channel.name not in self._missing:
            return False
        self._missing.discard(channel.name)
        self._channels[channel.name] = channel
        if not self._missing and not self.complete.called:
            self.complete.callback(self._channels)
        return True


def _late(failure: Failure) -> NoReturn:
    failure.trap(TimeoutError)
    raise ChannelClosed


def _spdy_protocol(http: h11.Request, ours: tuple[str, ...]) -> str:
    offered = protocols.offered(header_values(http, b"x-stream-protocol-version"))
    if not offered:
        raise Refused(HTTPStatus.BAD_REQUEST, "unable to upgrade: X-Stream-Protocol-Version is required")
    name = protocols.choose(offered, ours)
    if name is None:
        raise Refused(
            HTTPStatus.FORBIDDEN,
            f"unable to upgrade: none of the protocols offered is supported; supported are {', '.join(ours)}",
            [("X-Accepted-Stream-Protocol-Versions", each) for each in ours],
        )
    return name


def _websocket_dialect(http: h11.Request, ours: dict[str, Dialect]) -> Dialect:
    offered = protocols.offered(header_values(http, b"sec-websocket-protocol"))
    name = protocols.choose(offered or [""], list(ours))
    if name is None:
        spoken = ", ".join(filter(None, ours))
        raise Refused(
            HTTPStatus.FORBIDDEN, f"none of the protocols offered is supported; supported are {spoken}"
        )
    return ours[name]
