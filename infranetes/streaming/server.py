"""The daemon's HTTP server for streams: a CRI call makes a URL with a token, a client fetches it once."""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol

import h11
from twisted.internet.defer import Deferred, DeferredList, TimeoutError
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import Factory

from infranetes.streaming import protocols
from infranetes.streaming.channels import Channel, ChannelClosed
from infranetes.streaming.connection import (
    Refused,
    StreamingConnection,
    accept_websocket,
    header_values,
    wants_websocket,
)
from infranetes.streaming.portforward import Pairs
from infranetes.streaming.protocols import Dialect
from infranetes.streaming.sessions import Begin, channel_names, command_start, forward, serve_command
from infranetes.streaming.spdywire import SpdyWire
from infranetes.streaming.tokens import Tokens
from infranetes.streaming.tunnel import TunnelWire
from infranetes.streaming.websocketwire import WebSocketWire
from infranetes_common.errors import FailedPrecondition, InvalidArgument

#: Seconds for a client to open a session's streams, and between two bytes of a session.
STREAMS_TIMEOUT = 30.0
IDLE_TIMEOUT = 4 * 3600.0
#: Clients at once.
MAX_CONNECTIONS = 1000

_KINDS = ("exec", "attach", "portforward")


class Agents(Protocol):
    """Where the sessions come from: calls to the agent of the right VM, not yet begun."""

    def exec_call(self, container_id: str) -> Any:
        """The agent's Exec. :raise NotFound: no such container."""

    def attach_call(self, container_id: str) -> Any:
        """The agent's Attach. :raise NotFound: no such container."""

    def port_forward_call(self, sandbox_id: str) -> Any:
        """The agent's PortForward. :raise NotFound: no such sandbox."""


class StreamingServer(Factory):
    """Serves exec, attach and port-forward.

    :param host: an IP address of the node that kubelet reaches. :param port: 0: any that is free.
    """

    noisy = False

    def __init__(
        self, reactor: Any, agents: Agents, *, host: str = "127.0.0.1", port: int = 0, advertise: str = ""
    ) -> None:
        self._reactor = reactor
        self._agents = agents
        self._endpoint = TCP4ServerEndpoint(reactor, port, interface=host)
        self._advertise = advertise or host
        self._tokens = Tokens(reactor)
        self._listening: Any = None
        self._connections: set[StreamingConnection] = set()

    async def start(self) -> None:
        """Listen. :raise twisted.internet.error.CannotListenError: the address can't be had."""
        self._listening = await self._endpoint.listen(self)

    async def stop(self) -> None:
        """Listen no more and cut every session. Twice is once."""
        listening, self._listening = self._listening, None
        if listening is not None:
            await listening.stopListening()
        for connection in list(self._connections):
            connection.abort()

    def url(self, kind: str, request: Any) -> str:
        """The URL that answers a CRI Exec, Attach or PortForward: absolute, for one use within a minute.

        :raise InvalidArgument: the request asks for no stream, or for a terminal with a stderr of its own.
        :raise ResourceExhausted: too many URLs wait to be fetched.
        """
        if self._listening is None:
            raise FailedPrecondition("the streaming server is not running")
        _validate(kind, request)
        token = self._tokens.issue(kind, request)
        port = self._listening.getHost().port
        return f"http://{self._advertise}:{port}/{kind}/{token}"

    def buildProtocol(self, addr: IAddress | None) -> StreamingConnection | None:
        if len(self._connections) >= MAX_CONNECTIONS:
            return None
        connection = StreamingConnection(self._reactor, self, IDLE_TIMEOUT)
        self._connections.add(connection)
        return connection

    # For a connection

    def ended(self, connection: StreamingConnection) -> None:
        """The connection is lost."""
        self._connections.discard(connection)

    def begin(self, connection: StreamingConnection, http: h11.Request) -> None:
        """Agree on an upgrade and run what the token stands for.

        :raise Refused: how the request is to be answered instead.
        """
        parts = http.target.decode("latin-1").split("?", 1)[0].split("/")
        if len(parts) != 3 or parts[1] not in _KINDS:
            raise Refused(HTTPStatus.NOT_FOUND, "there is nothing here")
        if http.method not in (b"GET", b"POST"):
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, "GET or POST, please", [("Allow", "GET, POST")])
        kind = parts[1]
        request = self._tokens.redeem(kind, parts[2])
        if request is None:
            raise Refused(
                HTTPStatus.NOT_FOUND, "the token is unknown, was used before, or is over a minute old"
            )
        session: Coroutine[Any, Any, None]
        if kind == "portforward":
            session = self._begin_port_forward(connection, http, request)
        else:
            session = self._begin_command(connection, http, kind, request)
        connection.run(Deferred.fromCoroutine(session))

    # exec and attach

    def _begin_command(
        self, connection: StreamingConnection, http: h11.Request, kind: str, request: Any
    ) -> Coroutine[Any, Any, None]:
        start = command_start(request, list(request.cmd) if kind == "exec" else [])
        call = self._agents.exec_call if kind == "exec" else self._agents.attach_call
        begin = partial(call, request.container_id)
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
        self, begin: Begin, start: Any, channels: dict[str, Channel], version: int
    ) -> None:
        ready = channels["stdout" if start.stdout else "stderr" if start.stderr else "error"]
        await ready.write(b"")  # tells the client that the session stands
        await serve_command(begin, start, channels, version)

    async def _spdy_command(self, begin: Begin, start: Any, gathering: _Gathering, version: int) -> None:
        channels = await gathering.complete
        await serve_command(begin, start, channels, version)

    # port-forward

    def _begin_port_forward(
        self, connection: StreamingConnection, http: h11.Request, request: Any
    ) -> Coroutine[Any, Any, None]:
        def carry(port: int, data: Channel, error: Channel) -> Deferred[None]:
            begin = partial(self._agents.port_forward_call, request.pod_sandbox_id)
            return Deferred.fromCoroutine(forward(begin, port, data, error))

        if not wants_websocket(http):
            name = _spdy_protocol(http, protocols.PORT_FORWARD_SPDY)
            pairs = Pairs(self._reactor, carry, STREAMS_TIMEOUT)
            connection.wire = SpdyWire(connection.flow, connection.write, pairs.opened)
            connection.upgrade("SPDY/3.1", [("X-Stream-Protocol-Version", name)])
            return _until_lost(pairs)
        dialect = _websocket_dialect(http, protocols.PORT_FORWARD_WEBSOCKET)
        accepted = accept_websocket(http, dialect.name)
        if dialect.name == protocols.TUNNEL:
            pairs = Pairs(self._reactor, carry, STREAMS_TIMEOUT)
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
        return _websocket_port_forward(list(request.port), wire.channels, carry)


async def _websocket_port_forward(ports: list[int], channels: list[Channel], carry: Any) -> None:
    for number, port in enumerate(ports):
        for channel in channels[2 * number : 2 * number + 2]:
            await channel.write(port.to_bytes(2, "little"))
    running = [
        carry(port, channels[2 * number], channels[2 * number + 1]) for number, port in enumerate(ports)
    ]
    await DeferredList(running, consumeErrors=True)


async def _until_lost(pairs: Pairs) -> None:
    """The client ends a port-forward by closing the connection, which cancels this."""
    try:
        await Deferred()
    finally:
        pairs.stop()


class _Gathering:
    """Waits for a client to open the streams of its session.

    :ivar complete: fires with the channels by name. It fails with TimeoutError when they don't come.
    """

    def __init__(self, reactor: Any, names: list[str]) -> None:
        self._missing = set(names)
        self._channels: dict[str, Channel] = {}
        self.complete: Deferred[dict[str, Channel]] = Deferred()
        self.complete.addTimeout(STREAMS_TIMEOUT, reactor)
        self.complete.addErrback(_late)

    def opened(self, channel: Channel) -> bool:
        """A stream was asked for; whether it belongs to the session."""
        if channel.name not in self._missing:
            return False
        self._missing.discard(channel.name)
        self._channels[channel.name] = channel
        if not self._missing and not self.complete.called:
            self.complete.callback(self._channels)
        return True


def _late(failure: Any) -> Any:
    failure.trap(TimeoutError)
    raise ChannelClosed


def _validate(kind: str, request: Any) -> None:
    if kind == "portforward":
        for port in request.port:
            if not 0 < port < 65536:
                raise InvalidArgument(f"port: {port} is no TCP port")
        return
    if not (request.stdin or request.stdout or request.stderr):
        raise InvalidArgument("one of stdin, stdout and stderr has to be true")
    if request.tty and request.stderr:
        raise InvalidArgument("stderr: a terminal has none of its own; leave it false where tty is true")
    if kind == "exec" and not request.cmd:
        raise InvalidArgument("cmd: has to name a command")


def _spdy_protocol(http: h11.Request, ours: tuple[str, ...]) -> str:
    offered = protocols.offered(header_values(http, b"x-stream-protocol-version"))
    if not offered:
        raise Refused(HTTPStatus.BAD_REQUEST, "unable to upgrade: X-Stream-Protocol-Version is required")
    name = protocols.choose(offered, ours)
    if name is None:
        raise Refused(
            HTTPStatus.FORBIDDEN,
            f"unable to upgrade: none of the protocols offered is spoken here; these are: {', '.join(ours)}",
            [("X-Accepted-Stream-Protocol-Versions", each) for each in ours],
        )
    return name


def _websocket_dialect(http: h11.Request, ours: dict[str, Dialect]) -> Dialect:
    offered = protocols.offered(header_values(http, b"sec-websocket-protocol"))
    name = protocols.choose(offered or [""], list(ours))
    if name is None:
        spoken = ", ".join(filter(None, ours))
        raise Refused(
            HTTPStatus.FORBIDDEN, f"none of the protocols offered is spoken here; these are: {spoken}"
        )
    return ours[name]
