# SPDX-License-Identifier: Apache-2.0
"""A method may answer with the bytes of its response."""

from __future__ import annotations

import tempfile
from typing import Any

from twisted.internet import reactor
from twisted.internet.endpoints import UNIXClientEndpoint, UNIXServerEndpoint
from twisted.trial import unittest

from tests.txgrpc.demo import DEMO, DemoStub, Note
from txgrpc import Channel, Code, GrpcError, Server, Service


class Raw:
    """Answers with bytes, or with what is no response at all."""

    async def Echo(self, request: Any, call: Any) -> Any:
        return request.SerializeToString() if request.text else "no response"

    async def Count(self, request: Any, call: Any) -> Any:
        for number in range(3):
            yield Note(number=number).SerializeToString()


class SerializedTests(unittest.TestCase):
    """Over a real socket."""

    async def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        path = f"{directory.name}/s"
        server = Server(reactor, [Service(DEMO, Raw())])
        port = await UNIXServerEndpoint(reactor, path).listen(server.factory)
        channel = Channel(reactor, UNIXClientEndpoint(reactor, path))
        self.stub = DemoStub(channel)
        self.addCleanup(server.drain, 5)
        self.addCleanup(port.stopListening)
        self.addCleanup(channel.close)

    async def test_bytes_are_sent_as_they_are(self) -> None:
        note = Note(text="as it is", blob=b"\0" * 100_000)
        self.assertEqual(await self.stub.Echo(note, timeout=5), note)
        numbers = [each.number async for each in self.stub.Count(Note(), timeout=5)]
        self.assertEqual(numbers, [0, 1, 2])

    async def test_anything_else_is_a_fault_of_the_method(self) -> None:
        try:
            await self.stub.Echo(Note(), timeout=5)
        except GrpcError as error:
            self.assertIs(error.code, Code.INTERNAL)
        else:
            self.fail("not refused")
        self.flushLoggedErrors(TypeError)
