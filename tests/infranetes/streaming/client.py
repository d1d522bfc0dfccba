# SPDX-License-Identifier: Apache-2.0
"""A client of the streaming server, for tests: raw TCP, SPDY's other end, WebSocket's other end."""

from __future__ import annotations

import struct
from typing import Any
from urllib.parse import urlsplit

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import HostnameEndpoint, connectProtocol
from twisted.internet.protocol import Protocol
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, TextMessage

from infranetes.streaming.spdy import DataReceived, Spdy, StreamFinished, StreamReset


class Raw(Protocol):
    """Collect what is received, and let a test wait for a condition."""

    transport: Any

    def __init__(self) -> None:
        self.received = b""
        self.lost: Deferred[None] = Deferred()
        self._waiting: list[tuple[Any, Deferred[None]]] = []

    def dataReceived(self, data: bytes) -> None:
        self.received += data
        self.check()

    def connectionLost(self, reason: Any = None) -> None:
        self.lost.callback(None)

    def until(self, condition: Any) -> Deferred[None]:
        """Return a Deferred that fires once `condition()` is true."""
        done: Deferred[None] = Deferred()
        self._waiting.append((condition, done))
        self.check()
        return done

    def check(self) -> None:
        for waiting in [each for each in self._waiting if each[0]()]:
            self._waiting.remove(waiting)
            waiting[1].callback(None)


class Upgraded(Raw):
    """Speak another protocol after a 101 response. :ivar data: what was received, by stream or channel."""

    def __init__(self) -> None:
        super().__init__()
        self.head = b""
        self.data: dict[int, bytearray] = {}

    def dataReceived(self, data: bytes) -> None:
        if not self.head:
            self.received += data
            head, separator, rest = self.received.partition(b"\r\n\r\n")
            if not separator:
                return
            self.head, data = head, rest
        if self.head.startswith(b"HTTP/1.1 101"):
            self.read(data)
        self.check()

    def read(self, data: bytes) -> None:
        """Take in what comes after the response."""
        raise NotImplementedError


class SpdyClient(Upgraded):
    """Speak SPDY after a 101 response."""

    def __init__(self) -> None:
        super().__init__()
        self.spdy = Spdy(client=True)
        self.finished: set[int] = set()
        self.resets: set[int] = set()

    def read(self, data: bytes) -> None:
        for event in self.spdy.receive(data):
            if isinstance(event, DataReceived):
                self.data.setdefault(event.stream, bytearray()).extend(event.data)
            elif isinstance(event, StreamFinished):
                self.finished.add(event.stream)
            elif isinstance(event, StreamReset):
                self.resets.add(event.stream)
        self.flush()

    def open(self, **headers: str) -> int:
        stream = self.spdy.open_stream(headers)
        self.flush()
        return stream

    def write(self, stream: int, data: bytes, *, finish: bool = False) -> None:
        self.spdy.send_data(stream, data)
        if finish:
            self.spdy.finish(stream)
        self.flush()

    def flush(self) -> None:
        output = self.spdy.take_output()
        if output:
            self.transport.write(output)


class TunnelClient(SpdyClient):
    """Speak SPDY inside WebSocket messages after a 101 response."""

    def __init__(self) -> None:
        super().__init__()
        self.socket = Connection(ConnectionType.CLIENT)

    def read(self, data: bytes) -> None:
        self.socket.receive_data(data)
        for event in self.socket.events():
            if isinstance(event, BytesMessage):
                super().read(bytes(event.data))

    def flush(self) -> None:
        output = self.spdy.take_output()
        if output:
            self.transport.write(self.socket.send(BytesMessage(data=output)))


class WebSocketClient(Upgraded):
    """Speak WebSocket after a 101 response."""

    def __init__(self) -> None:
        super().__init__()
        self.socket = Connection(ConnectionType.CLIENT)
        self.texts: list[str] = []
        self.closed = False

    def read(self, data: bytes) -> None:
        self.socket.receive_data(data)
        for event in self.socket.events():
            if isinstance(event, BytesMessage):
                self.data.setdefault(event.data[0], bytearray()).extend(event.data[1:])
            elif isinstance(event, TextMessage):
                self.texts.append(event.data)
            elif isinstance(event, CloseConnection):
                self.closed = True
                self.transport.write(self.socket.send(event.response()))

    def write(self, channel: int, data: bytes) -> None:
        self.transport.write(self.socket.send(BytesMessage(data=bytes([channel]) + data)))

    def write_text(self, text: str) -> None:
        self.transport.write(self.socket.send(TextMessage(data=text)))


def take(wire: Any, data: bytes) -> None:
    """Let the wire handle all of it."""
    wire.receive(data)
    for _ in wire.work():
        pass


async def connect(reactor: Any, url: str, client: Raw, head: str) -> Any:
    """Connect to the URL's server and send `head`, in which ``{path}`` is the URL's path."""
    parts = urlsplit(url)
    endpoint = HostnameEndpoint(reactor, parts.hostname or "", parts.port or 0)
    await connectProtocol(endpoint, client)
    text = head.format(path=parts.path).replace("\n", "\r\n") + "\r\n"
    client.transport.write(text.encode())
    return client


def spdy_head(*protocols: str) -> str:
    """Return a request for SPDY with these sub-protocols."""
    lines = ["POST {path} HTTP/1.1", "Host: node", "Connection: Upgrade", "Upgrade: SPDY/3.1"]
    return "\n".join([*lines, *(f"X-Stream-Protocol-Version: {name}" for name in protocols), ""])


def websocket_head(*protocols: str) -> str:
    """Return a request for a WebSocket with these sub-protocols."""
    lines = ["GET {path} HTTP/1.1", "Host: node", "Connection: Upgrade", "Upgrade: websocket"]
    lines += ["Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="]
    if protocols:
        lines.append(f"Sec-WebSocket-Protocol: {', '.join(protocols)}")
    return "\n".join([*lines, ""])


def oversized_data_frame(stream: int) -> bytes:
    """Return the head of a data frame that announces 16 MiB."""
    return struct.pack(">II", stream, 0xFFFFFF)
