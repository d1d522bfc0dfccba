# SPDX-License-Identifier: Apache-2.0
"""A proxy that parses nothing: client, proxy and server, each with a real socket between."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import UNIXClientEndpoint, UNIXServerEndpoint
from twisted.trial import unittest

from tests.txgrpc.demo import DEMO, Demo, DemoStub, Note
from tests.txgrpc.proxy import Proxy
from tests.txgrpc.support import drain_iterator, socket_path, status_of
from txgrpc import Call, Channel, Code, GrpcError, Server, Service
from txgrpc.raw import RawStub, raw_method

DETAILS = ("grpc-status-details-bin", b"\x08\x05details")
# A field that Note doesn't have.
UNKNOWN = b"\xc2\x3e\x04more"


class More(Demo):
    """Fails with a status that has details, and tells when a Wait has begun."""

    def __init__(self) -> None:
        super().__init__(reactor)
        self.waiting: Deferred[None] = Deferred()
        self.over: Deferred[None] = Deferred()

    async def Fail(self, request: Any, call: Any) -> Any:
        raise GrpcError(Code.NOT_FOUND, "no such note", (DETAILS,))

    async def Wait(self, request: Any, call: Any) -> Any:
        self.remaining = call.time_remaining()
        self.waiting.callback(None)
        try:
            await Deferred()
        finally:
            self.over.callback(None)


class RawTests(unittest.TestCase):
    """What passes a proxy passes as it was."""

    async def setUp(self) -> None:
        self.demo = More()
        path = socket_path(self)
        server = Server(reactor, [Service(DEMO, self.demo)])
        port = await UNIXServerEndpoint(reactor, path).listen(server.factory)
        self.addCleanup(lambda: server.drain(2))
        self.addCleanup(port.stopListening)
        self.proxy = Proxy(self, path)
        await self.proxy.start(self)
        self.channel = Channel(reactor, UNIXClientEndpoint(reactor, self.proxy.path))
        self.addCleanup(self.channel.close)
        self.stub = DemoStub(self.channel)
        self.raw = RawStub(self.channel)

    async def test_bytes_pass_unchanged_with_fields_that_nobody_knows(self) -> None:
        sent = Note(text="hello").SerializeToString() + UNKNOWN
        answer = await self.raw.call("/txgrpc.demo.Demo/Echo", sent, metadata=[("x-who", "me")], timeout=60)
        self.assertEqual(answer, sent)
        self.assertEqual(self.proxy.seen, [sent])
        self.assertIn(("x-who", "me"), self.demo.calls[0].metadata)
        agents = [value for name, value in self.demo.calls[0].metadata if name == "user-agent"]
        self.assertEqual(len(agents), 1)

    async def test_what_is_no_message_passes_too(self) -> None:
        """A proxy leaves that to the server."""
        error = await status_of(self.raw.call("/txgrpc.demo.Demo/Echo", b"\xff\xff", timeout=60))
        self.assertEqual((error.code, self.proxy.seen), (Code.INTERNAL, [b"\xff\xff"]))

    async def test_a_stream_of_responses(self) -> None:
        notes = await drain_iterator(self.stub.Count(Note(number=3, blob=b"x" * 300_000)))
        self.assertEqual([note.number for note in notes], [0, 1, 2])
        error = await status_of(drain_iterator(self.stub.Count(Note(number=1, text="enough"))))
        self.assertEqual((error.code, error.message), (Code.ABORTED, "enough"))

    async def test_calls_of_every_kind_are_relayed(self) -> None:
        """Of these the proxy knows nothing but the path."""
        self.assertEqual((await self.stub.Sum(Note(number=n) for n in range(50))).number, sum(range(50)))
        chat = self.stub.Chat()
        for word in ("one", "two"):
            await chat.send(Note(text=word))
            self.assertEqual((await chat.__anext__()).text, word.upper())
        await chat.done_sending()
        self.assertEqual(await drain_iterator(chat), [])
        missing = await status_of(self.stub.Missing(Note()))
        self.assertEqual(missing.code, Code.UNIMPLEMENTED)
        self.assertIn("does not offer Missing", missing.message)
        self.assertEqual(
            self.proxy.asked, [f"/txgrpc.demo.Demo/{name}" for name in ("Sum", "Chat", "Missing")]
        )

    async def test_a_status_passes_with_its_details(self) -> None:
        error = await status_of(self.stub.Fail(Note()))
        self.assertEqual((error.code, error.message), (Code.NOT_FOUND, "no such note"))
        self.assertIn(DETAILS, error.metadata)

    async def test_the_deadline_and_the_end_of_a_call_pass(self) -> None:
        waiting = self.stub.Wait(Note(), timeout=60)
        await self.demo.waiting
        self.assertTrue(0 < self.demo.remaining <= 60, self.demo.remaining)
        waiting.cancel()
        self.assertEqual((await status_of(waiting)).code, Code.CANCELLED)
        await self.demo.over

    async def test_a_server_that_ends_an_upload_early(self) -> None:
        error = await status_of(self.stub.Sum(Note(text="enough") for _ in range(1000)))
        self.assertEqual((error.code, error.message), (Code.ABORTED, "enough"))

    async def test_what_is_known_to_none_is_told_as_ever(self) -> None:
        error = await status_of(self.raw.call("/other.Service/Call", b"", timeout=60))
        self.assertEqual(error.code, Code.UNIMPLEMENTED)
        self.assertIn("there is no service for /other.Service/Call here", error.message)

    async def test_a_raw_method_answers_with_bytes_only(self) -> None:
        async def answer(request: bytes, call: Call) -> Message:
            note: Message = Note()
            return note

        self.proxy.server._methods[b"/x/Y"] = (raw_method("/x/Y"), answer)
        error = await status_of(self.raw.call("/x/Y", b"", timeout=60))
        self.assertEqual(error.code, Code.INTERNAL)
        self.assertEqual(len(self.flushLoggedErrors(TypeError)), 1)
