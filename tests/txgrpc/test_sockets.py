# SPDX-License-Identifier: Apache-2.0
"""Our client against our server over real sockets."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import (
    TCP4ClientEndpoint,
    TCP4ServerEndpoint,
    UNIXClientEndpoint,
    UNIXServerEndpoint,
)
from twisted.trial import unittest

from tests.txgrpc.demo import DEMO, Demo, DemoStub, Note
from txgrpc import Call, Channel, Code, GrpcError, Server, Service
from txgrpc.peers import PeerCredentials


class UnixSocketTests(unittest.TestCase):
    """All four kinds of call over a unix socket."""

    async def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = os.path.join(directory.name, "socket")
        self.demo = Demo(reactor)
        self.server = Server(reactor, [Service(DEMO, self.demo)])
        self.port = await UNIXServerEndpoint(reactor, self.path).listen(self.server.factory)
        self.channel = Channel(reactor, UNIXClientEndpoint(reactor, self.path))
        self.stub = DemoStub(self.channel)
        self.addCleanup(lambda: Deferred.fromCoroutine(self._close()))

    async def _close(self) -> None:
        await self.channel.close()
        await self.port.stopListening()
        await self.server.drain(5)

    async def status_of(self, awaitable: Any) -> GrpcError:
        try:
            await awaitable
        except GrpcError as error:
            return error
        self.fail("the call succeeded")

    async def test_unary(self) -> None:
        """One request, one response."""
        self.assertEqual(await self.stub.Echo(Note(text="hello"), timeout=5), Note(text="hello"))

    async def test_who_calls(self) -> None:
        """The kernel says which process is at the other end."""
        found: list[PeerCredentials | None] = []

        class Asked:
            async def Echo(self, request: Any, call: Call) -> Any:
                found.append(call.peer_credentials)
                return Note()

        path = self.path + "2"
        server = Server(reactor, [Service(DEMO, Asked())])
        for listening, connecting in (
            (UNIXServerEndpoint(reactor, path), lambda port: UNIXClientEndpoint(reactor, path)),
            (
                TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1"),
                lambda port: TCP4ClientEndpoint(reactor, "127.0.0.1", port.getHost().port),
            ),
        ):
            port = await listening.listen(server.factory)
            self.addCleanup(port.stopListening)
            channel = Channel(reactor, connecting(port))
            self.addCleanup(channel.close)
            await DemoStub(channel).Echo(Note(), timeout=5)
        self.assertEqual(found, [PeerCredentials(os.getpid(), os.getuid(), os.getgid()), None])

    async def test_large(self) -> None:
        """Messages far larger than a window arrive whole in both directions."""
        blob = os.urandom(5_000_000)
        self.assertEqual((await self.stub.Echo(Note(blob=blob), timeout=50)).blob, blob)

    async def test_server_streaming(self) -> None:
        """Responses come in order and end with the status."""
        numbers = [note.number async for note in self.stub.Count(Note(number=100))]
        self.assertEqual(numbers, list(range(100)))

    async def test_large_stream(self) -> None:
        """A stream larger than any buffer arrives whole."""
        size = 0
        async for note in self.stub.Count(Note(number=100, blob=b"x" * 100_000)):
            size += len(note.blob)
        self.assertEqual(size, 10_000_000)

    async def test_client_streaming(self) -> None:
        """Requests come from a plain iterable or an async generator."""
        self.assertEqual((await self.stub.Sum(Note(number=n) for n in range(5))).number, 10)

        async def numbers() -> Any:
            for number in range(2000):
                yield Note(number=number, blob=b"x" * 1000)

        self.assertEqual((await self.stub.Sum(numbers())).number, 1999000)

    async def test_bidirectional(self) -> None:
        """Both sides talk in turn."""
        chat = self.stub.Chat(timeout=5)
        for word in ("one", "two"):
            await chat.send(Note(text=word))
            self.assertEqual((await chat.__anext__()).text, word.upper())
        await chat.done_sending()
        self.assertEqual([note async for note in chat], [])

    async def test_statuses(self) -> None:
        """Every status arrives with its message and metadata."""
        for code in list(Code)[1:]:
            error = await self.status_of(self.stub.Fail(Note(number=code, text="grün %\n")))
            self.assertEqual((error.code, error.message), (code, "grün %\n"))
            self.assertIn(("x-why-bin", b"\0\xff"), error.metadata)
        error = await self.status_of(self.stub.Missing(Note()))
        self.assertEqual(error.code, Code.UNIMPLEMENTED)
        error = await self.status_of(self.stub.Fail(Note(number=-1)))
        self.assertEqual(error.code, Code.INTERNAL)
        self.assertNotIn("secret", error.message)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    async def test_deadline(self) -> None:
        """A call whose time is over ends on both sides."""
        error = await self.status_of(self.stub.Wait(Note(), timeout=0.5))
        self.assertEqual(error.code, Code.DEADLINE_EXCEEDED)
        while not self.demo.ended:
            await self.stub.Echo(Note())
        self.assertEqual(self.demo.ended, ["Wait cancelled"])
