# SPDX-License-Identifier: Apache-2.0
"""Connections to a guest's ports, over real sockets."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Factory, Protocol
from twisted.trial.unittest import TestCase
from zope.interface import implementer

from infranetes.machines.agentless.port_forward import forwarded
from infranetes.machines.sessions import PortForwardCall
from infranetes_common.byte_connection import AHEAD_BYTES
from infranetes_common.concurrency import start
from infranetes_common.errors import InvalidArgument, Unavailable
from infranetes_common.reactors import IReactor
from infranetes_common.wire import vmserver
from tests.support.waiting import until

WHOLE = 4 * AHEAD_BYTES


@implementer(IHalfCloseableProtocol)
class _Guest(Protocol):
    """What listens in the guest: sends back what it gets, and closes when the other side has."""

    def __init__(self, made: list[_Guest]) -> None:
        made.append(self)
        self.lost: Deferred[None] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        self.transport.write(data)

    def readConnectionLost(self) -> None:
        self.transport.loseConnection()

    def writeConnectionLost(self) -> None:
        pass

    def connectionLost(self, reason: Any = None) -> None:
        self.lost.callback(None)


class PortForwardTests(TestCase):
    """A guest that echoes on a port."""

    async def setUp(self) -> None:
        self.guests: list[_Guest] = []
        factory = Factory.forProtocol(lambda: _Guest(self.guests))  # type: ignore[arg-type]
        factory.noisy = False
        listening = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(factory)
        self.addCleanup(listening.stopListening)
        self.port = listening.getHost().port

    def call(self) -> PortForwardCall:
        call = forwarded(cast(IReactor, reactor), "127.0.0.1")
        self.addCleanup(call.cancel)
        return call

    async def connected(self) -> PortForwardCall:
        call = self.call()
        await call.send(vmserver.PortForwardInput(port=self.port))
        return call

    async def test_bytes_go_both_ways_until_both_are_done(self) -> None:
        call = await self.connected()
        await call.send(vmserver.PortForwardInput(data=b"hello"))
        await call.done_sending()
        self.assertEqual(b"".join([one.data async for one in call]), b"hello")

    async def test_many_bytes_wait_for_the_one_who_reads_them(self) -> None:
        call = await self.connected()

        async def send() -> None:
            for _ in range(WHOLE // 65536):
                await call.send(vmserver.PortForwardInput(data=b"x" * 65536))
            await call.done_sending()

        sending = start(send())
        size = 0
        async for one in call:
            size += len(one.data)
        await sending
        self.assertEqual(size, WHOLE)

    async def test_a_connection_that_the_guest_resets_ends_as_any_other(self) -> None:
        """Said as an error, kubectl would give up all connections of the forward."""
        call, other = await self.connected(), await self.connected()
        await until(lambda: len(self.guests) == 2, "both are connected")
        self.guests[0].transport.abortConnection()
        self.assertEqual([one.data async for one in call], [])
        with self.assertRaises(Unavailable):
            await call.send(vmserver.PortForwardInput(data=b"b"))
        await other.send(vmserver.PortForwardInput(data=b"on"))
        await other.done_sending()
        self.assertEqual(b"".join([one.data async for one in other]), b"on")

    async def test_a_port_on_which_nothing_listens_is_told(self) -> None:
        unused = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Factory())
        port = unused.getHost().port
        await unused.stopListening()
        call = self.call()
        with self.assertRaises(Unavailable) as refused:
            await call.send(vmserver.PortForwardInput(port=port))
        self.assertIn(f"port {port}", str(refused.exception))

    async def test_a_number_that_is_no_port_is_refused(self) -> None:
        for port in (0, 65536):
            with self.assertRaises(InvalidArgument):
                await self.call().send(vmserver.PortForwardInput(port=port))

    async def test_one_who_leaves_ends_the_connection(self) -> None:
        call = await self.connected()
        await call.send(vmserver.PortForwardInput(data=b"a"))
        async for _ in call:
            break
        call.cancel()
        await self.guests[0].lost
