# SPDX-License-Identifier: Apache-2.0
"""Clients that send what requires answers and do not read them: what is buffered for them is bounded."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from typing import Any

from twisted.internet import reactor
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, Ping, TextMessage

from infranetes.streaming.headerblock import HeaderWriter
from infranetes_common.wire import cri
from tests.infranetes.streaming.client import (
    Raw,
    SpdyClient,
    TunnelClient,
    WebSocketClient,
    spdy_head,
    websocket_head,
)
from tests.infranetes.streaming.test_server import StreamingCase, ended, output

KIB = 1024
#: Bytes that a client sends unless it is stopped before.
SENT = 512 * KIB
#: Bytes that may be buffered for a client that does not read: the transport's limit, and the answers to what
#: has been read by then.
BOUND = 256 * KIB
_COMMAND = "v4.channel.k8s.io"


def control(kind: int, payload: bytes, flags: int = 0) -> bytes:
    """Return a control frame of SPDY."""
    return struct.pack(">HHI", 0x8003, kind, flags << 24 | len(payload)) + payload


def refused_streams(writer: HeaderWriter, count: int) -> bytes:
    """Return requests for streams that no session has."""
    heads = [struct.pack(">IIH", 101 + 2 * number, 0, 0) for number in range(count)]
    return b"".join(control(1, head + writer.write({"streamtype": "nonsense"})) for head in heads)


def taken_streams(count: int) -> bytes:
    """Return requests for streams of a port-forward, each of which is then closed."""
    writer = HeaderWriter()
    frames = []
    for stream in range(1, 2 * count, 2):
        headers = {"streamtype": "data", "port": "80", "requestid": str(stream)}
        frames.append(control(1, struct.pack(">IIH", stream, 0, 0) + writer.write(headers)))
        frames.append(control(3, struct.pack(">II", stream, 5)))
    return b"".join(frames)


class FloodTests(StreamingCase):
    async def flood(self, client: Raw, frames: bytes, most_sent: int = SENT) -> int:
        """Send `frames` repeatedly without reading. Return the most bytes buffered for the client."""
        connection: Any = next(iter(self.server._connections))
        # The kernel's buffers would hold much of it.
        connection.transport.getHandle().setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * KIB)
        client.transport.getHandle().setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * KIB)
        client.transport.pauseProducing()
        client.transport.bufferSize = 4 * KIB  # so that the test's own turns are short as well
        most = sent = 0
        times = max(1, 64 * KIB // len(frames))
        while sent < most_sent and connection.flow.reading and not connection.flow.lost:
            client.transport.write(frames * times)
            sent += len(frames) * times
            while connection.flow.reading and not handled(client, connection):
                most = max(most, buffered(connection))
                await deferLater(reactor, 0)
            most = max(most, buffered(connection))
        return most

    async def spdy(self) -> tuple[SpdyClient, dict[str, int]]:
        client = await self.connect(self.exec_url(stdin=True), SpdyClient(), spdy_head(_COMMAND))
        streams = {name: client.open(streamtype=name) for name in ("error", "stdin", "stdout")}
        await self.call()
        return client, streams

    async def websocket(self) -> WebSocketClient:
        client: Any = await self.connect(
            self.exec_url(stdin=True), WebSocketClient(), websocket_head(_COMMAND)
        )
        await self.call()
        return client  # type: ignore[no-any-return]

    def port_forward_url(self) -> str:
        return self.server.url("portforward", cri.PortForwardRequest(pod_sandbox_id="p"))

    async def test_spdy(self) -> None:
        for what, frames in {
            "PING": control(6, struct.pack(">I", 1)),
            "SETTINGS": control(4, struct.pack(">I", 0)),
            "NOOP": control(5, b""),
            "data for no stream": struct.pack(">II", 999, 0),
            "WINDOW_UPDATE": control(9, struct.pack(">II", 1, 1)),
            "RST_STREAM": control(3, struct.pack(">II", 999, 1)),
        }.items():
            client, streams = await self.spdy()
            self.assertLessEqual(await self.flood(client, frames), BOUND, what)
            client.transport.resumeProducing()
            self.agents.calls[-1].answer(output(stdout=b"after it"))
            self.agents.calls[-1].answer(ended(0))
            await client.until(lambda c=client, s=streams: s["error"] in c.finished)
            self.assertEqual(client.data[streams["stdout"]], b"after it", what)
            client.transport.abortConnection()
            await client.lost
            await self.settle(lambda: not self.server._connections)

    async def test_streams_that_are_refused(self) -> None:
        client, _ = await self.spdy()
        frames = await deferToThread(refused_streams, client.spdy._writer, 20_000)
        self.assertLessEqual(await self.flood(client, frames, 1), BOUND)
        connection: Any = next(iter(self.server._connections))
        self.assertFalse(connection.flow.reading, "it is held back")

    async def test_streams_that_are_taken_and_end(self) -> None:
        client = await self.connect(self.port_forward_url(), SpdyClient(), spdy_head("portforward.k8s.io"))
        await client.until(lambda: bool(client.head))
        frames = await deferToThread(taken_streams, 20_000)
        self.assertLessEqual(await self.flood(client, frames, 1), BOUND)

    async def test_websocket(self) -> None:
        for payload in (b"", bytes(125)):
            client = await self.websocket()
            frames = Connection(ConnectionType.CLIENT).send(Ping(payload))
            self.assertLessEqual(await self.flood(client, frames), BOUND)
            client.transport.resumeProducing()
            self.agents.calls[-1].answer(output(stdout=b"after it"))
            self.agents.calls[-1].answer(ended(0))
            await client.until(lambda c=client: c.closed)
            self.assertEqual(client.data[1], b"after it")
            client.transport.abortConnection()
            await client.lost
            await self.settle(lambda: not self.server._connections)

    async def test_a_tunnel(self) -> None:
        spdy_ping = control(6, struct.pack(">I", 1))
        for message in (Ping(b""), BytesMessage(spdy_ping), BytesMessage(spdy_ping * 1000)):
            head = websocket_head("SPDY/3.1+portforward.k8s.io")
            client = await self.connect(self.port_forward_url(), TunnelClient(), head)
            await client.until(lambda c=client: bool(c.head))
            frames = Connection(ConnectionType.CLIENT).send(message)
            self.assertLessEqual(await self.flood(client, frames), BOUND)
            client.transport.abortConnection()
            await client.lost
            await self.settle(lambda: not self.server._connections)

    async def test_a_message_that_never_ends_and_has_nothing_in_it(self) -> None:
        client = await self.websocket()
        socket = Connection(ConnectionType.CLIENT)
        empty = TextMessage("", message_finished=False)
        first, rest = socket.send(empty), socket.send(empty)
        client.transport.write(first)
        await self.flood(client, rest, 64 * KIB)
        wire: Any = next(iter(self.server._connections)).wire
        self.assertLess(len(wire._text), 10)

    async def test_small_pieces_of_input_count_for_more_than_their_bytes(self) -> None:
        """An agent that does not take input, and a client that sends it two bytes at a time."""
        client, streams = await self.spdy()
        call = self.agents.calls[-1]
        await self.flood(client, struct.pack(">II", streams["stdin"], 2) + b"ab")
        connection: Any = next(iter(self.server._connections))
        wire: Any = connection.wire
        self.assertLess(sum(len(each._unread) for each in wire._channels.values()), 8192)
        self.assertFalse(call.cancelled)

    async def test_input_goes_on_while_output_is_not_read(self) -> None:
        """Only requests with answers are held back: a command may keep reading while its output waits."""
        client, streams = await self.spdy()
        call = self.agents.calls[-1]
        connection: Any = next(iter(self.server._connections))
        client.transport.pauseProducing()
        for _ in range(400):
            call.answer(output(stdout=bytes(64 * KIB)))
        await self.settle(lambda: connection.flow.full)
        client.write(streams["stdin"], b"still heard", finish=True)
        await call.half_closed
        self.assertEqual(call.stdin(), b"still heard")


def handled(client: Any, connection: Any) -> bool:
    """Return whether everything that the client has sent has been handled."""
    unread = struct.unpack("i", fcntl.ioctl(connection.transport.getHandle(), termios.FIONREAD, bytes(4)))[0]
    return not buffered(client) and not unread and connection._turn is None


def buffered(end: Any) -> int:
    """Return how many bytes are buffered in this process for the other end."""
    transport = end.transport
    waiting: int = len(transport.dataBuffer) - transport.offset + transport._tempDataLen
    return waiting
