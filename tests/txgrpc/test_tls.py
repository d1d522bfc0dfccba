# SPDX-License-Identifier: Apache-2.0
"""Mutual TLS: who is who, and who is refused."""

from __future__ import annotations

import os
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import gatherResults
from twisted.internet.endpoints import (
    SSL4ServerEndpoint,
    TCP4ClientEndpoint,
    TCP4ServerEndpoint,
    connectProtocol,
    wrapClientTLS,
)
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.ssl import optionsForClientTLS
from twisted.trial import unittest

from tests.txgrpc.certificates import Authority
from tests.txgrpc.demo import DEMO, Demo, DemoStub, Note
from tests.txgrpc.support import status_of
from tests.txgrpc.test_hostile import PREFACE, Raw
from txgrpc import Channel, Code, Limits, Server, Service


class TLSTests(unittest.TestCase):
    """A server that wants a certificate, and clients with all sorts of them."""

    async def setUp(self) -> None:
        self.authority = Authority("the CA")
        self.demo = Demo(reactor)
        self.server = Server(reactor, [Service(DEMO, self.demo)], limits=Limits(handshake_timeout=2))
        options = self.authority.private("server.test").options(self.authority.certificate)
        endpoint = SSL4ServerEndpoint(reactor, 0, options, interface="127.0.0.1")
        self.port = await endpoint.listen(self.server.factory)
        self.addCleanup(lambda: self.server.drain(2))
        self.addCleanup(self.port.stopListening)

    def plain(self) -> TCP4ClientEndpoint:
        return TCP4ClientEndpoint(reactor, "127.0.0.1", self.port.getHost().port)

    def channel(self, certificate: Any, trust: Any = None, name: str = "server.test") -> Channel:
        options = optionsForClientTLS(name, trust or self.authority.certificate, certificate)
        channel = Channel(reactor, wrapClientTLS(options, self.plain()))
        self.addCleanup(channel.close)
        return channel

    async def test_both_sides_know_each_other(self) -> None:
        """Calls work, h2 is negotiated, and the method sees the client's certificate."""
        channel = self.channel(self.authority.private("client.test"))
        stub = DemoStub(channel)
        blob = os.urandom(1_000_000)
        self.assertEqual((await stub.Echo(Note(blob=blob))).blob, blob)
        call = self.demo.calls[0]
        self.assertEqual(call.peer_certificate.get_subject().CN, "client.test")
        connection: Any = next(iter(self.server.connections))
        self.assertEqual(connection.transport.negotiatedProtocol, b"h2")
        total = await stub.Sum(Note(number=1, blob=b"x" * 50_000) for _ in range(50))
        self.assertEqual(total.number, 50)
        self.assertEqual(len([n async for n in stub.Count(Note(number=50, blob=b"x" * 50_000))]), 50)

    async def test_refusals(self) -> None:
        """A client's certificate by another CA, or none; a server's other name or CA: UNAVAILABLE, and no
        method is called."""
        other = Authority("another CA")
        mine = self.authority.private("client.test")
        for channel in (
            self.channel(other.private("client.test")),
            self.channel(None),
            self.channel(mine, name="elsewhere.test"),
            self.channel(mine, trust=other.certificate),
        ):
            error = await status_of(DemoStub(channel).Echo(Note(), timeout=20))
            self.assertEqual(error.code, Code.UNAVAILABLE)
            self.assertNotIn("cleanly", error.message)
        self.assertEqual(self.demo.calls, [])
        self.assertEqual((await DemoStub(self.channel(mine)).Echo(Note(text="on"))).text, "on")

    async def test_not_tls(self) -> None:
        """Plain text, noise and silence are cut off and harm nobody."""
        stub = DemoStub(self.channel(self.authority.private("client.test")))
        await stub.Echo(Note())
        for data in (PREFACE, os.urandom(100), b"\x16\x03\x01\xff\xff", b""):
            peer = await connectProtocol(self.plain(), Raw())
            peer.send(data)
            await peer.lost
        self.assertEqual((await stub.Echo(Note(text="on"))).text, "on")

    async def test_a_channel_to_a_silent_peer_closes_at_once(self) -> None:
        """Nothing was agreed upon that had to be ended."""
        silent = Factory.forProtocol(Protocol)
        port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(silent)
        self.addCleanup(port.stopListening)
        endpoint = TCP4ClientEndpoint(reactor, "127.0.0.1", port.getHost().port)
        options = optionsForClientTLS("server.test", self.authority.certificate)
        channel = Channel(reactor, wrapClientTLS(options, endpoint))
        error = await status_of(DemoStub(channel).Echo(Note(), timeout=0.3))
        self.assertEqual(error.code, Code.DEADLINE_EXCEEDED)
        [connection] = channel._live
        await channel.close().addTimeout(connection.limits.close_timeout / 2, reactor)

    async def test_many_channels(self) -> None:
        """A hundred channels in one process, each with calls of its own."""
        certificate = self.authority.private("client.test")
        stubs = [DemoStub(self.channel(certificate)) for _ in range(100)]
        for start in range(0, 100, 5):  # as many handshakes at once as end in time on a busy machine
            notes = [stub.Echo(Note(number=n), timeout=30) for n, stub in enumerate(stubs[start : start + 5])]
            found = await gatherResults(notes)
            self.assertEqual([note.number for note in found], list(range(5)))
        self.assertEqual(len(self.server.connections), 100)
