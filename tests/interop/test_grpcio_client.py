# SPDX-License-Identifier: Apache-2.0
"""grpcio's client calls our server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.endpoints import SSL4ServerEndpoint, UNIXServerEndpoint
from twisted.trial import unittest

from tests.txgrpc.certificates import Authority
from tests.txgrpc.demo import DEMO, Demo
from tests.txgrpc.support import Child, socket_path
from txgrpc import Code, Server, Service

PEER = "tests.interop.grpcio_peer"


class GrpcioClientTests(unittest.TestCase):
    """What grpcio's client sees of our server on a unix socket."""

    async def setUp(self) -> None:
        self.path = socket_path(self)
        self.demo = Demo(reactor)
        self.server = Server(reactor, [Service(DEMO, self.demo)])
        self.port = await UNIXServerEndpoint(reactor, self.path).listen(self.server.factory)
        self.addCleanup(lambda: self.server.drain(2))
        self.addCleanup(self.port.stopListening)

    async def run_scenario(self, name: str) -> Any:
        return json.loads(await Child.start(self, reactor, PEER, name, self.path).line())

    async def test_every_kind_of_call(self) -> None:
        """Unary, both ways of streaming, and a conversation."""
        seen = await self.run_scenario("kinds")
        expected = {
            "unary": "hello",
            "down": list(range(50)),
            "up": sum(range(50)),
            "chat": ["ONE", "TWO", "THREE"],
            "end": True,
            "code": "OK",
        }
        self.assertEqual(seen, expected)

    async def test_every_status(self) -> None:
        """Code, message and trailing metadata of every status arrive as they were raised."""
        for code, seen in zip(list(Code)[1:], await self.run_scenario("statuses"), strict=True):
            self.assertEqual((seen["code"], seen["message"]), (code.name, "grün 100% \n\x7f"))
            self.assertEqual(seen["trailing"]["x-why-bin"], "00ff")

    async def test_status_of_streams_and_missing_methods(self) -> None:
        """A stream ends with its status; what is not offered is UNIMPLEMENTED."""
        seen = await self.run_scenario("stream_status")
        codes = [each["code"] for each in seen]
        self.assertEqual(codes, ["ABORTED", "UNIMPLEMENTED", "UNIMPLEMENTED", "ABORTED"], str(seen))
        self.assertIn("does not offer Missing", seen[1]["message"])

    async def test_large_messages(self) -> None:
        """Megabytes arrive whole; a message over the limit fails its call and no other."""
        seen = await self.run_scenario("large")
        self.assertEqual((seen["same"], seen["count"], seen["up"]), (True, 10_000_000, 20))
        self.assertEqual(seen["over"]["code"], "RESOURCE_EXHAUSTED")
        self.assertIn("16777216", seen["over"]["message"])
        self.assertEqual(seen["after"], "still here")

    async def test_metadata(self) -> None:
        """Text and binary metadata come and go unchanged, repeated names in order."""
        expected = [
            ["x-text", "a b, c"],
            ["x-text", "two"],
            ["x-raw-bin", bytes(range(256)).hex()],
            ["x-raw-bin", ""],
        ]
        self.assertEqual(await self.run_scenario("metadata"), expected)

    async def test_deadlines(self) -> None:
        """Calls whose time is over end on both sides."""
        self.assertEqual(await self.run_scenario("deadlines"), ["DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", 10])
        self.assertEqual(sorted(self.demo.ended), ["Chat cancelled", "Wait", "Wait cancelled"])

    async def test_cancellation(self) -> None:
        """A cancelled call cancels its method."""
        seen = await self.run_scenario("cancellation")
        self.assertEqual(seen, {"codes": ["CANCELLED"] * 3, "after": "on"})
        self.assertEqual(sorted(self.demo.ended), ["Chat cancelled", "Count cancelled", "Wait cancelled"])

    async def test_many_at_once(self) -> None:
        """200 calls at once on one connection."""
        self.assertEqual(await self.run_scenario("many"), {"unary": True, "streams": True})

    async def test_compression_is_declined(self) -> None:
        """A compressed call is told what is accepted; the client goes on uncompressed."""
        refused, plain = await self.run_scenario("compressed")
        self.assertEqual(refused["code"], "UNIMPLEMENTED")
        self.assertEqual(plain, "plain")

    async def test_large_headers(self) -> None:
        """Headers over the limit fail their call alone."""
        self.assertEqual(await self.run_scenario("headers"), ["RESOURCE_EXHAUSTED", "on"])

    async def test_drain(self) -> None:
        """Draining lets the running call end and takes no other."""
        child = Child.start(self, reactor, PEER, "drain", self.path)
        self.assertEqual(await child.line(), "running")
        await self.port.stopListening()
        drained = self.server.drain(20)
        child.say()
        answer, after = json.loads(await child.line())
        self.assertEqual((answer, after), ("finished", "UNAVAILABLE"))
        await drained
        self.assertFalse(self.server.connections)


class GrpcioTLSClientTests(unittest.TestCase):
    """What grpcio's client sees of our server behind mutual TLS."""

    async def test_every_kind_of_call(self) -> None:
        """h2 is negotiated as grpcio demands it, and the client is known by its certificate."""
        authority, demo = Authority("the CA"), Demo(reactor)
        server = Server(reactor, [Service(DEMO, demo)])
        options = authority.private("server.test").options(authority.certificate)
        port = await SSL4ServerEndpoint(reactor, 0, options, interface="127.0.0.1").listen(server.factory)
        self.addCleanup(lambda: server.drain(2))
        self.addCleanup(port.stopListening)
        directory = Path(self.mktemp())
        directory.mkdir()
        certificate, key = authority.issue("client.test")
        for name, content in (("ca.pem", authority.pem), ("cert.pem", certificate), ("key.pem", key)):
            (directory / name).write_bytes(content)
        number = str(port.getHost().port)
        child = Child.start(self, reactor, PEER, "kinds", number, str(directory.absolute()))
        seen = json.loads(await child.line())
        self.assertEqual((seen["unary"], seen["up"], seen["code"]), ("hello", sum(range(50)), "OK"))
        self.assertEqual(demo.calls[0].peer_certificate.get_subject().CN, "client.test")
