# SPDX-License-Identifier: Apache-2.0
"""Peers that break the rules, over real sockets: each is cut off or refused, and harms nobody else.

Frames are written byte by byte (RFC 9113, 4.1), as no library would let us.
"""

from __future__ import annotations

import os
from typing import Any

from hpack import Decoder, Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import UNIXClientEndpoint, UNIXServerEndpoint, connectProtocol
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater
from twisted.trial import unittest

from tests.txgrpc.demo import DEMO, Demo, DemoStub, Note
from tests.txgrpc.support import drain_iterator, socket_path, status_of
from txgrpc import Channel, Code, Limits, Server, Service
from txgrpc.framing import frame

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/txgrpc.demo.Demo/Echo"),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]
ECHO = frame(Note(text="hello").SerializeToString())


class Raw(Protocol):
    """A peer that sends what it is told and remembers what it gets."""

    transport: Any

    def __init__(self) -> None:
        self.lost: Deferred[None] = Deferred()
        self.received = b""  # and not parsed yet
        self.parsed: list[Frame] = []
        self.encoder = Encoder()
        self.reading = True

    def dataReceived(self, data: bytes) -> None:
        self.received += data

    def connectionLost(self, reason: Any = None) -> None:
        self.lost.callback(None)

    def send(self, *frames: Frame | bytes) -> None:
        self.transport.write(b"".join(f if isinstance(f, bytes) else f.serialize() for f in frames))

    def headers(self, stream_id: int, end: bool = False, **changes: str | None) -> HeadersFrame:
        """The headers of a call to Echo; ``_`` in a name stands for ``-``, a leading one for ``:``."""
        named = {
            k.replace("_", ":", 1) if k[0] == "_" else k.replace("_", "-"): v for k, v in changes.items()
        }
        fields: list[Any] = [(name, named.pop(name, value)) for name, value in HEADERS]
        fields += list(named.items())
        flags = ["END_HEADERS", "END_STREAM"] if end else ["END_HEADERS"]
        return HeadersFrame(
            stream_id, self.encoder.encode([f for f in fields if f[1] is not None]), flags=flags
        )

    def frames(self) -> list[Frame]:
        """The frames received so far."""
        data, at = memoryview(self.received), 0
        while len(data) - at >= 9:
            head, length = Frame.parse_frame_header(data[at : at + 9])
            if len(data) - at < 9 + length:
                break
            head.parse_body(data[at + 9 : at + 9 + length])
            self.parsed.append(head)
            at += 9 + length
        self.received = self.received[at:]
        return self.parsed

    def goaway(self) -> tuple[int, bytes]:
        """The last GOAWAY's code and reason."""
        last = [f for f in self.frames() if isinstance(f, GoAwayFrame)][-1]
        return last.error_code, last.additional_data


def settings() -> SettingsFrame:
    """A client's first frame."""
    return SettingsFrame(0)


class HostileClientTests(unittest.TestCase):
    """A server with one honest client, which must notice nothing."""

    async def setUp(self) -> None:
        self.path = socket_path(self)
        self.demo = Demo(reactor)
        limits = Limits(handshake_timeout=1, close_timeout=1)
        self.server = Server(reactor, [Service(DEMO, self.demo)], limits=limits)
        port = await UNIXServerEndpoint(reactor, self.path).listen(self.server.factory)
        self.addCleanup(lambda: self.server.drain(1))
        self.addCleanup(port.stopListening)
        self.channel = Channel(reactor, UNIXClientEndpoint(reactor, self.path))
        self.addCleanup(self.channel.close)
        self.honest = DemoStub(self.channel)
        self.chat = self.honest.Chat(timeout=50)
        await self.chat.send(Note(text="before"))
        await self.chat.__anext__()
        self.addCleanup(lambda: Deferred.fromCoroutine(self.unharmed()))

    async def unharmed(self) -> None:
        """The honest client's call goes on, and another one is answered."""
        await self.chat.send(Note(text="after"))
        self.assertEqual((await self.chat.__anext__()).text, "AFTER")
        await self.honest.Echo(Note(), timeout=5)
        await self.chat.done_sending()
        await drain_iterator(self.chat)

    async def raw(self, begin: bool = True) -> Raw:
        peer: Raw = await connectProtocol(UNIXClientEndpoint(reactor, self.path), Raw())
        self.addCleanup(peer.transport.abortConnection)
        if begin:
            peer.send(PREFACE, settings())
        return peer

    async def cut_off(self, peer: Raw, code: int | None = None) -> None:
        """`peer` is disconnected, with this HTTP/2 error."""
        await peer.lost
        if code is not None:
            self.assertEqual(peer.goaway()[0], code, peer.goaway())

    async def answer(self, peer: Raw, kind: type[Frame], count: int = 1) -> list[Any]:
        """The first `count` frames of `kind` that come."""
        while True:
            found = [f for f in peer.frames() if isinstance(f, kind)]
            if len(found) >= count or peer.lost.called:
                return found
            await deferLater(reactor, 0.01, lambda: None)

    async def test_not_http2(self) -> None:
        """Other protocols are cut off at once."""
        for data in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\x02\x00",
            os.urandom(4096),
            PREFACE + b"x" * 100,
        ):
            peer = await self.raw(begin=False)
            peer.send(data)
            await self.cut_off(peer)

    async def test_silence(self) -> None:
        """Who connects and says nothing, or only half of the beginning, is cut off in time."""
        peers = [await self.raw(begin=False) for _ in range(3)]
        peers[1].send(PREFACE[:10])
        peers[2].send(PREFACE)
        for peer in peers:
            await self.cut_off(peer)

    async def test_rapid_reset(self) -> None:
        """Calls begun and reset over and over are stopped (CVE-2023-44487)."""
        peer = await self.raw()
        for n in range(1, 6000, 2):
            peer.send(peer.headers(n, _path="/txgrpc.demo.Demo/Chat"), RstStreamFrame(n, error_code=8))
        await self.cut_off(peer, 11)
        self.assertLess(len(self.demo.calls), 2000)

    async def test_provoked_resets(self) -> None:
        """Calls spoilt so that we reset them are counted too (CVE-2025-8671)."""
        peer = await self.raw()
        for n in range(1, 6000, 2):
            peer.send(peer.headers(n, _path="/txgrpc.demo.Demo/Chat"))
            peer.send(*[WindowUpdateFrame(n, window_increment=2**31 - 1)] * 2)
        await self.cut_off(peer, 11)

    async def test_broken_messages(self) -> None:
        """Calls with a broken message over and over are stopped."""
        peer = await self.raw()
        for n in range(1, 20_000):  # a slow client needs more of them
            peer.send(
                peer.headers(2 * n - 1, _path="/txgrpc.demo.Demo/Sum"), DataFrame(2 * n - 1, b"\xff" * 5)
            )
            if n % 200 == 0:
                await self.answer(peer, RstStreamFrame, n)
                if peer.lost.called:
                    break
        await self.cut_off(peer, 11)

    async def test_floods(self) -> None:
        """Frames that cost the sender nothing are counted, whatever their kind."""
        unknown = b"\0\0\0\x55\0\0\0\0\0"
        floods: dict[str, Any] = {
            "SETTINGS": settings(),
            "PING": PingFrame(0, b"12345678"),
            "needless": PriorityFrame(1, stream_weight=1, depends_on=0),
            "empty DATA": DataFrame(1),
            "WINDOW_UPDATE": WindowUpdateFrame(0, window_increment=1),
            "unknown": unknown,
        }
        for name, flood in floods.items():
            peer = await self.raw()
            peer.send(peer.headers(1, _path="/txgrpc.demo.Demo/Sum"))
            peer.send(*[flood] * 3000)
            await self.cut_off(peer, 11)
            self.assertIn(name.replace("unknown", "needless").encode(), peer.goaway()[1])

    async def test_unread_answers(self) -> None:
        """Who floods and does not read holds no more memory than the bound."""
        peer = await self.raw()
        peer.transport.pauseProducing()
        for n in range(1, 4000, 2):
            peer.send(peer.headers(n, end=True, _path=f"/no.Such/{os.urandom(200).hex()}"))
        await deferLater(reactor, 0.5, lambda: None)
        peer.transport.resumeProducing()
        peer.send(b"\xff" * 100)
        await peer.lost

    async def test_header_bomb(self) -> None:
        """A small block that unpacks to megabytes of headers is refused while it unpacks."""
        peer = await self.raw()
        block = peer.encoder.encode([("x-bomb", "x" * 3000)])
        indexed = bytes([0x80 | 62])
        fields = peer.encoder.encode(HEADERS)
        peer.send(HeadersFrame(1, fields + block + indexed * 12000, flags=["END_HEADERS"]))
        await self.cut_off(peer, 11)

    async def test_continuation_flood(self) -> None:
        """A header block without an end is not collected for ever."""
        peer = await self.raw()
        peer.send(HeadersFrame(1, b"", flags=[]))
        for _ in range(1000):
            peer.send(ContinuationFrame(1, b"x" * 1000))
        await self.cut_off(peer, 1)

    async def test_oversized_frame(self) -> None:
        """A frame larger than allowed is refused by its header; its body is not waited for."""
        peer = await self.raw()
        peer.send((2**24 - 1).to_bytes(3, "big") + b"\0\0\0\0\0\1")
        await self.cut_off(peer, 6)

    async def test_broken_frames(self) -> None:
        """What HTTP/2 does not allow ends the connection."""
        for frames in (
            [DataFrame(1, b"no stream")],
            [b"\0\0\1\6\0\0\0\0\0x"],  # a PING of 1 byte
            [HeadersFrame(2, b"\x82", flags=["END_HEADERS"])],
            [HeadersFrame(1, b"\xff\xff\xff\xff\xff", flags=["END_HEADERS"])],
            [HeadersFrame(1, b"\x82", flags=["END_HEADERS"])],  # a method and no path
            [SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 2**32 - 1})],
            [SettingsFrame(0, {SettingsFrame.MAX_FRAME_SIZE: 1})],
        ):
            peer = await self.raw()
            peer.send(*frames)
            await self.cut_off(peer)

    async def test_window_is_enforced(self) -> None:
        """Who sends more than its window is cut off."""
        peer = await self.raw()
        peer.send(peer.headers(1, _path="/txgrpc.demo.Demo/Wait"))
        for _ in range(100):
            peer.send(DataFrame(1, frame(b"x" * 16000)))
        await self.cut_off(peer, 3)

    async def test_http_errors(self) -> None:
        """Requests that are not gRPC get an HTTP status; the connection stays."""
        peer = await self.raw()
        peer.send(peer.headers(1, content_type="text/plain"))
        peer.send(peer.headers(3, _method="GET", end=True))
        peer.send(peer.headers(5, content_type=None, end=True))
        peer.send(peer.headers(7, content_type="application/grpcx", end=True))
        decoder: Any = Decoder()
        found = await self.answer(peer, HeadersFrame, 4)
        statuses = {f.stream_id: dict(decoder.decode(f.data))[":status"] for f in found}
        self.assertEqual(statuses, {1: "415", 3: "405", 5: "415", 7: "415"})

    async def test_broken_calls(self) -> None:
        """Calls that break gRPC's rules get a status; the connection stays."""
        calls: dict[int, tuple[Code, list[Any]]] = {}
        peer = await self.raw()

        def call(code: Code, data: bytes, end: bool = True, **changes: Any) -> None:
            stream_id = 2 * len(calls) + 1
            frames = [DataFrame(stream_id, data, flags=["END_STREAM"] if end else [])]
            calls[stream_id] = code, frames
            peer.send(peer.headers(stream_id, **changes), *frames)

        call(Code.OK, ECHO)
        call(Code.UNIMPLEMENTED, b"")
        call(Code.UNIMPLEMENTED, ECHO + ECHO)
        call(Code.INTERNAL, ECHO[:-1])
        call(Code.INTERNAL, ECHO[:3])
        for path in ("Sum", "Chat"):
            call(Code.INTERNAL, frame(b"") + ECHO[:-1], _path=f"/txgrpc.demo.Demo/{path}")
            call(Code.INTERNAL, ECHO[:3], _path=f"/txgrpc.demo.Demo/{path}")
        call(Code.INTERNAL, b"\1" + ECHO[1:])
        call(Code.INTERNAL, b"\7" + ECHO[1:])
        call(Code.INTERNAL, frame(b"\xff"))
        call(Code.RESOURCE_EXHAUSTED, b"\0\xff\xff\xff\xff", end=False)
        call(Code.UNIMPLEMENTED, ECHO, grpc_encoding="gzip")
        call(Code.OK, ECHO, grpc_encoding="identity")
        call(Code.INTERNAL, ECHO, grpc_timeout="soon")
        call(Code.INVALID_ARGUMENT, ECHO, x_bad_bin="?")
        call(Code.RESOURCE_EXHAUSTED, ECHO, x_long="0" * 20_000)
        call(Code.UNIMPLEMENTED, ECHO, _path="/txgrpc.demo.Demo/Missing")
        call(Code.UNIMPLEMENTED, ECHO, _path="/txgrpc.demo.Demo/")
        call(Code.OK, ECHO, content_type="application/grpc+proto")
        codes = {stream_id: code for stream_id, (code, _) in calls.items()}
        self.assertEqual(set((await self.check_statuses(peer, codes)).values()), {"identity"})

    async def check_statuses(self, peer: Raw, expected: dict[int, Code]) -> dict[int, str]:
        """Check the statuses that come. Returns what those that accept no encoding but some say of it."""
        while True:
            decoder: Any = Decoder()
            found, accepted = {}, {}
            for f in peer.frames():
                if isinstance(f, HeadersFrame):
                    fields = dict(decoder.decode(f.data))
                    if "grpc-status" in fields:
                        found[f.stream_id] = Code(int(fields["grpc-status"]))
                        if "grpc-accept-encoding" in fields:
                            accepted[f.stream_id] = fields["grpc-accept-encoding"]
            if len(found) == len(expected) or peer.lost.called:
                break
            await deferLater(reactor, 0.01, lambda: None)
        self.assertEqual(found, expected)
        return accepted

    async def test_garbage(self) -> None:
        """Noise after a proper beginning."""
        for _ in range(50):
            peer = await self.raw()
            peer.send(peer.headers(1), os.urandom(2000), b"\xff" * 20_000)
            await self.cut_off(peer)

    async def test_connection_lost_in_the_middle(self) -> None:
        """Who leaves in the middle of anything leaves nothing behind."""
        for cut in range(0, 300, 7):
            peer = await self.raw(begin=False)
            data = (
                PREFACE
                + settings().serialize()
                + peer.headers(1).serialize()
                + DataFrame(1, ECHO).serialize()
            )
            peer.send(data[:cut])
            peer.transport.loseConnection()
            await peer.lost
        while len(self.server.connections) > 1:
            await deferLater(reactor, 0.01, lambda: None)


class HostileServerTests(unittest.TestCase):
    """Servers that break the rules: the call fails with a status."""

    async def status_from(self, *output: bytes) -> Any:
        """How a call ends that gets this for an answer."""
        path = socket_path(self)
        factory: Any = Factory.forProtocol(Scripted)
        factory.output = b"".join(output)
        port = await UNIXServerEndpoint(reactor, path).listen(factory)
        channel = Channel(reactor, UNIXClientEndpoint(reactor, path), limits=Limits(max_receive_message=1000))
        try:
            return await status_of(DemoStub(channel).Echo(Note(), timeout=10))
        finally:
            await channel.close()
            await port.stopListening()

    def head(self, *fields: tuple[str, str], end: bool = False) -> bytes:
        flags = ["END_HEADERS", "END_STREAM"] if end else ["END_HEADERS"]
        return bytes(HeadersFrame(1, Encoder().encode(list(fields)), flags=flags).serialize())

    async def test_answers(self) -> None:
        """What is not a gRPC response, by what it is."""
        ok, grpc = (":status", "200"), ("content-type", "application/grpc")
        data = bytes(DataFrame(1, ECHO).serialize())
        trailers = self.head(("grpc-status", "0"), end=True)
        for code, words, output in (
            (Code.UNIMPLEMENTED, "HTTP 404", [self.head((":status", "404"), end=True)]),
            (Code.UNAVAILABLE, "HTTP 503", [self.head((":status", "503"), ("content-type", "text/html"))]),
            (Code.UNKNOWN, "HTTP 0", [self.head((":status", "9" * 5000), end=True)]),
            (Code.UNKNOWN, "HTTP 0", [self.head((":status", "2xx"), end=True)]),
            (Code.UNKNOWN, "text/html", [self.head(ok, ("content-type", "text/html"))]),
            (Code.UNKNOWN, "without a status", [self.head(ok, grpc, end=True)]),
            (
                Code.ABORTED,
                "why%",
                [self.head((":status", "503"), ("grpc-status", "10"), ("grpc-message", "why%"), end=True)],
            ),
            (Code.UNKNOWN, "'99'", [self.head(ok, grpc, ("grpc-status", "99"), end=True)]),
            (Code.UNKNOWN, "'x'", [self.head(ok, grpc, ("grpc-status", "x"), end=True)]),
            (Code.UNIMPLEMENTED, "exactly once", [self.head(ok, grpc), trailers]),
            (Code.UNIMPLEMENTED, "exactly once", [self.head(ok, grpc), data, data, trailers]),
            (
                Code.UNAVAILABLE,
                "data before headers",
                [data, self.head(ok, grpc, ("grpc-status", "0"), end=True)],
            ),
            (
                Code.INTERNAL,
                "without a status",
                [self.head(ok, grpc), bytes(DataFrame(1, ECHO, flags=["END_STREAM"]).serialize())],
            ),
            (
                Code.INTERNAL,
                "middle",
                [self.head(ok, grpc), bytes(DataFrame(1, ECHO[:-1]).serialize()), trailers],
            ),
            (
                Code.INTERNAL,
                "compressed",
                [self.head(ok, grpc), bytes(DataFrame(1, b"\1" + ECHO[1:]).serialize())],
            ),
            (Code.INTERNAL, "gzip", [self.head(ok, grpc, ("grpc-encoding", "gzip"))]),
            (
                Code.INTERNAL,
                "not a txgrpc.demo.Note",
                [self.head(ok, grpc), bytes(DataFrame(1, frame(b"\xff")).serialize()), trailers],
            ),
            (
                Code.RESOURCE_EXHAUSTED,
                "1000",
                [self.head(ok, grpc), bytes(DataFrame(1, b"\0\0\0\x03\xe9").serialize())],
            ),
            (Code.RESOURCE_EXHAUSTED, "reset", [bytes(RstStreamFrame(1, error_code=11).serialize())]),
            (Code.CANCELLED, "reset", [bytes(RstStreamFrame(1, error_code=8).serialize())]),
            (
                Code.UNAVAILABLE,
                "go away",
                [
                    bytes(
                        GoAwayFrame(0, last_stream_id=0, error_code=0, additional_data=b"go away").serialize()
                    )
                ],
            ),
            (Code.UNAVAILABLE, "", [b"\xff" * 100]),
        ):
            with_words = await self.status_from(*output)
            self.assertEqual((with_words.code, words in with_words.message), (code, True), with_words)

    async def test_what_comes_with_the_headers_of_a_stream_is_known_while_it_goes_on(self) -> None:
        path = socket_path(self)
        factory: Any = Factory.forProtocol(Scripted)
        factory.output = self.head(
            (":status", "200"), ("content-type", "application/grpc"), ("x-from", "here")
        )
        port = await UNIXServerEndpoint(reactor, path).listen(factory)
        channel = Channel(reactor, UNIXClientEndpoint(reactor, path))
        call = DemoStub(channel).Count(Note(text="x" * 60))
        try:
            while not call.initial_metadata:
                await deferLater(reactor, 0.01, lambda: None)
            self.assertEqual(dict(call.initial_metadata)["x-from"], "here")
        finally:
            call.cancel()
            await channel.close()
            await port.stopListening()


class Scripted(Protocol):
    """Answers the first call with the factory's output, whatever it is."""

    answered = False
    transport: Any
    factory: Any

    def connectionMade(self) -> None:
        self.received = b""
        self.transport.write(SettingsFrame(0).serialize())

    def dataReceived(self, data: bytes) -> None:
        self.received += data
        if len(self.received) > 120 and not self.answered:  # the preface, the settings and a call
            self.answered = True
            self.transport.write(self.factory.output)
