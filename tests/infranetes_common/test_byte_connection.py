# SPDX-License-Identifier: Apache-2.0
"""Connections that coroutines read and write, over real unix sockets."""

from __future__ import annotations

import tempfile

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import UNIXClientEndpoint, UNIXServerEndpoint
from twisted.internet.error import ConnectError
from twisted.internet.protocol import Factory
from twisted.trial.unittest import TestCase

from infranetes_common.byte_connection import AHEAD_BYTES, ByteConnection, connected
from infranetes_common.concurrency import start
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import installed
from tests.support.waiting import until

reactor = installed()
WHOLE = 16 * AHEAD_BYTES


class _Accepting(Factory):
    noisy = False

    def __init__(self) -> None:
        self.accepted: Deferred[ByteConnection] = Deferred()

    def buildProtocol(self, addr: object) -> ByteConnection:
        other = ByteConnection("the client")
        reactor.callLater(0, self.accepted.callback, other)
        return other


class ByteConnectionTests(TestCase):
    async def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = f"{directory.name}/socket"
        accepting = _Accepting()
        port = await UNIXServerEndpoint(reactor, self.path).listen(accepting)
        self.addCleanup(port.stopListening)
        self.here = await connected(UNIXClientEndpoint(reactor, self.path), "the server")
        self.there = await accepting.accepted
        self.addCleanup(self.here.abort)
        self.addCleanup(self.there.abort)

    async def all_of(self, connection: ByteConnection) -> bytes:
        found = b""
        while data := await connection.read():
            found += data
        return found

    async def test_what_one_side_writes_the_other_reads_until_it_is_closed(self) -> None:
        await self.here.write(b"a")
        await self.here.write(b"b")
        self.here.close()
        self.assertEqual(await self.all_of(self.there), b"ab")
        self.assertEqual(await self.there.read(), b"")

    async def test_one_who_reads_nothing_has_the_other_side_wait(self) -> None:
        sent = 0

        async def send() -> None:
            nonlocal sent
            for _ in range(WHOLE // 65536):
                await self.here.write(bytes(65536))
                sent += 65536
            self.here.close()

        sending = start(send())
        await until(lambda: self.there._paused, "what is not read is no longer received")
        self.assertLess(sent, WHOLE)
        self.assertEqual(len(await self.all_of(self.there)), WHOLE)
        await sending

    async def test_one_that_is_aborted_is_lost_for_both_readers_and_writers(self) -> None:
        reading = start(self.here.read())
        self.here.abort()
        with self.assertRaises(Unavailable):
            await reading
        with self.assertRaises(Unavailable) as refused:
            await self.here.write(b"a")
        self.assertIn("the server", str(refused.exception))
        self.here.abort()
        self.here.close()
        self.here.done_writing()

    async def test_a_writer_that_waits_is_told_of_the_end(self) -> None:
        async def send() -> None:
            while True:
                await self.here.write(bytes(65536))

        sending = start(send())
        await until(lambda: self.there._paused, "what is not read is no longer received")
        self.there.abort()
        with self.assertRaises(Unavailable):
            await sending

    async def test_what_can_not_be_reached_is_said_by_the_endpoint(self) -> None:
        with self.assertRaises(ConnectError):
            await connected(UNIXClientEndpoint(reactor, self.path + "x"), "nobody")
