# SPDX-License-Identifier: Apache-2.0
"""Our client calls grpcio's server."""

from __future__ import annotations

import os
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import gatherResults
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.task import deferLater
from twisted.trial import unittest

from tests.txgrpc.demo import DemoStub, Note
from tests.txgrpc.support import Child, drain_iterator, socket_path, status_of
from txgrpc import Channel, Code, Limits

PEER = "tests.interop.grpcio_peer"


class GrpcioServerTests(unittest.TestCase):
    """What our client sees of grpcio's asyncio server on a unix socket."""

    async def setUp(self) -> None:
        path = socket_path(self)
        self.peer = Child.start(self, reactor, PEER, "server", path)
        self.assertEqual(await self.peer.line(), "ready")
        # Small enough that making one message is no turn of the reactor worth speaking of.
        limits = Limits(max_receive_message=5 * 1024 * 1024)
        self.channel = Channel(reactor, UNIXClientEndpoint(reactor, path), limits=limits)
        self.addCleanup(self.channel.close)
        self.stub = DemoStub(self.channel)

    async def test_every_kind_of_call(self) -> None:
        """Unary, both ways of streaming, and a conversation."""
        self.assertEqual((await self.stub.Echo(Note(text="hello"))).text, "hello")
        notes = await drain_iterator(self.stub.Count(Note(number=50)))
        self.assertEqual([note.number for note in notes], list(range(50)))
        self.assertEqual((await self.stub.Sum(Note(number=n) for n in range(50))).number, sum(range(50)))
        chat = self.stub.Chat()
        for word in ("one", "two", "three"):
            await chat.send(Note(text=word))
            self.assertEqual((await chat.__anext__()).text, word.upper())
        await chat.done_sending()
        self.assertEqual(await drain_iterator(chat), [])

    async def test_every_status(self) -> None:
        """Code, message and trailing metadata arrive as they were raised."""
        for code in list(Code)[1:]:
            error = await status_of(self.stub.Fail(Note(number=code, text="grün 100% \n\x7f")))
            self.assertEqual((error.code, error.message), (code, "grün 100% \n\x7f"))
            self.assertIn(("x-why-bin", b"\0\xff"), error.metadata)

    async def test_status_of_streams_and_missing_methods(self) -> None:
        """The responses before the status are had before it."""
        call = self.stub.Count(Note(number=3, text="after three"))
        numbers = []
        with self.assertRaises(Exception) as caught:
            async for note in call:
                numbers.append(note.number)
        self.assertEqual((caught.exception.code, caught.exception.message), (Code.ABORTED, "after three"))
        self.assertEqual(numbers, [0, 1, 2])
        self.assertEqual((await status_of(self.stub.Missing(Note()))).code, Code.UNIMPLEMENTED)

    async def test_server_ends_an_upload_early(self) -> None:
        """The status of a call whose requests were not all taken; its iterable is closed."""
        closed = []

        async def endless() -> Any:
            try:
                yield Note(text="enough")
                while True:
                    yield Note(blob=b"x" * 10_000)
            finally:
                closed.append(True)

        error = await status_of(self.stub.Sum(endless(), timeout=30))
        self.assertEqual((error.code, closed), (Code.ABORTED, [True]))

    async def test_large_messages(self) -> None:
        """Megabytes arrive whole; a message over our limit fails its call and no other."""
        blob = os.urandom(4_000_000)
        self.assertEqual((await self.stub.Echo(Note(blob=blob))).blob, blob)
        notes = await drain_iterator(self.stub.Count(Note(number=20, blob=b"x" * 500_000)))
        self.assertEqual(sum(len(note.blob) for note in notes), 10_000_000)
        total = await self.stub.Sum(Note(number=1, blob=b"y" * 500_000) for _ in range(20))
        self.assertEqual(total.number, 20)
        error = await status_of(self.stub.Echo(Note(blob=b"z" * (6 * 1024 * 1024)), timeout=60))
        self.assertEqual(error.code, Code.RESOURCE_EXHAUSTED)
        self.assertEqual((await self.stub.Echo(Note(text="still here"))).text, "still here")

    async def test_metadata(self) -> None:
        """Text and binary metadata come and go unchanged, repeated names in order."""
        sent = [("x-text", "a b, c"), ("x-text", "two"), ("x-raw-bin", bytes(range(256))), ("x-raw-bin", b"")]
        call = self.stub.Chat(metadata=sent)
        await call.send(Note(text="bye"))
        self.assertEqual(await drain_iterator(call), [])
        call = self.stub.Count(Note(number=1), metadata=sent)
        await drain_iterator(call)
        self.assertEqual(call.trailing_metadata, ())

    async def test_deadlines(self) -> None:
        """The server learns the deadline, and a call whose time is over ends."""
        remaining = await self.stub.Wait(Note(number=1), timeout=30)
        self.assertTrue(20 < float(remaining.text) <= 30, remaining.text)
        self.assertEqual((await status_of(self.stub.Wait(Note(), timeout=0.2))).code, Code.DEADLINE_EXCEEDED)
        chat = self.stub.Chat(timeout=0.2)
        await chat.send(Note(text="x"))
        self.assertEqual((await status_of(drain_iterator(chat))).code, Code.DEADLINE_EXCEEDED)

    async def test_cancellation(self) -> None:
        """Cancelling a Deferred or a stream ends the call on the server; the channel serves on."""
        wait = self.stub.Wait(Note())
        wait.cancel()
        self.assertEqual((await status_of(wait)).code, Code.CANCELLED)
        async with self.stub.Count(Note(number=10**6, blob=b"x" * 10_000)) as count:
            await count.__anext__()
        self.assertEqual((await status_of(drain_iterator(count))).code, Code.CANCELLED)
        for _ in range(100):
            call = self.stub.Chat()
            await call.send(Note(text="cancelled?"))
            cancelled = (await call.__anext__()).text
            call.cancel()
            if cancelled == "Count":
                break
            await deferLater(reactor, 0.02, lambda: None)
        self.assertEqual(cancelled, "Count")

    async def test_many_at_once(self) -> None:
        """200 calls at once on one connection."""
        notes = await gatherResults(
            [self.stub.Wait(Note(number=n % 20 + 1, text=str(n)), timeout=60) for n in range(200)]
        )
        self.assertEqual([note.text for note in notes], [str(n) for n in range(200)])

    async def test_server_stops(self) -> None:
        """A server that drains lets the running call end; later calls can't connect."""
        running = self.stub.Wait(Note(number=500, text="finished"), timeout=30)
        await self.stub.Echo(Note())
        self.peer.say()
        self.assertEqual((await running).text, "finished")
        await self.peer.ended
        self.assertEqual((await status_of(self.stub.Echo(Note(), timeout=30))).code, Code.UNAVAILABLE)
