# SPDX-License-Identifier: Apache-2.0
"""Connections to agents have a mark, by which the node's rules know them."""

from __future__ import annotations

import socket
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.tcp import Client
from twisted.trial.unittest import TestCase

from infranetes.machines.agent import marked
from infranetes.machines.agent.marked import marked_endpoint
from infranetes_common.identity import AGENT_MARK
from infranetes_common.reactors import installed
from tests.harness.needs import needs_netns

reactor = installed()


class MarkedTests(TestCase):
    """Over a real socket."""

    async def setUp(self) -> None:
        accepting: Any = Factory.forProtocol(Protocol)
        self.port: Any = reactor.listenTCP(0, accepting, interface="127.0.0.1")
        self.addCleanup(self.port.stopListening)

    async def connected(self) -> Any:
        endpoint = marked_endpoint(reactor, "127.0.0.1", self.port.getHost().port, 5.0)
        lost: Deferred[None] = Deferred()

        class Peer(Protocol):
            def connectionLost(self, reason: Any = None) -> None:
                lost.callback(None)

        peer: Any = await endpoint.connect(Factory.forProtocol(Peer))
        self.addCleanup(lambda: lost)
        self.addCleanup(peer.transport.loseConnection)
        return peer.transport

    @needs_netns
    async def test_the_daemons_have_the_mark(self) -> None:
        transport = await self.connected()
        self.assertIsInstance(transport, Client)
        mark = transport.getHandle().getsockopt(socket.SOL_SOCKET, socket.SO_MARK)
        self.assertEqual(mark, AGENT_MARK)

    async def test_without_the_right_to_mark_it_connects_all_the_same(self) -> None:
        real = socket.socket

        class Refusing(real):  # type: ignore[misc, valid-type]
            def setsockopt(self, *arguments: Any) -> None:
                if arguments[1] == socket.SO_MARK:
                    raise PermissionError(1, "Operation not permitted")
                real.setsockopt(self, *arguments)

        def made(client: object, *arguments: object) -> socket.socket:
            found = Refusing(socket.AF_INET, socket.SOCK_STREAM)
            found.setblocking(False)
            return found

        self.patch(Client, "createInternetSocket", made)
        transport = await self.connected()
        self.assertEqual(transport.getPeer().host, "127.0.0.1")

    def test_it_is_a_reactor_as_the_one_below(self) -> None:
        found = marked._Reactor(reactor)
        self.assertTrue(IReactorTime.providedBy(found))
        self.assertEqual(found.seconds.__name__, reactor.seconds.__name__)  # type: ignore[attr-defined]
