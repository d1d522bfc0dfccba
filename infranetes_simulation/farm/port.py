# SPDX-License-Identifier: Apache-2.0
"""A VM's port on loopback, which can also refuse connections, or accept them and say nothing."""

from __future__ import annotations

import socket
from typing import Protocol, cast

from twisted.internet.address import IPv4Address
from twisted.internet.defer import maybeDeferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.interfaces import IAddress, IListeningPort, IProtocol, IProtocolFactory
from twisted.internet.protocol import Protocol as BaseProtocol
from twisted.internet.protocol import connectionDone
from twisted.internet.tcp import Connection
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes_common.concurrency import deferred
from infranetes_common.reactors import IReactor

HOST = "127.0.0.1"


class AgentFactory(Protocol):
    """The part of `vmserver.identity.tls.BoundedTLSFactory` that this module needs."""

    def buildProtocol(self, addr: IAddress) -> IProtocol | None: ...

    def abort_all(self) -> None: ...


class _Silent(BaseProtocol):
    """Neither reads nor writes."""

    transport: Connection

    def __init__(self, connections: set[_Silent]) -> None:
        self._connections = connections

    def connectionMade(self) -> None:
        self.transport.pauseProducing()
        self._connections.add(self)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._connections.discard(self)


@implementer(IProtocolFactory)
class SwitchableFactory:
    """Hands connections to the agent, or leaves them without an answer.

    :ivar silent: whether they get no answer.
    """

    def __init__(self, agent: AgentFactory) -> None:
        self._agent = agent
        self._connections: set[_Silent] = set()
        self.silent = False

    def doStart(self) -> None:
        """Called by Twisted when it begins to listen."""

    def doStop(self) -> None:
        """Called by Twisted when it listens no more."""

    def buildProtocol(self, addr: IAddress) -> IProtocol | None:
        if self.silent:
            return cast(IProtocol, _Silent(self._connections))
        return self._agent.buildProtocol(addr)

    def abort_all(self) -> None:
        """Reset every connection."""
        self._agent.abort_all()
        for connection in list(self._connections):
            connection.transport.abortConnection()


@implementer(IListeningPort)
class VmPort:
    """A port of loopback that stays the VM's own, whether or not something listens on it."""

    def __init__(self, reactor: IReactor, port: IListeningPort, factory: SwitchableFactory) -> None:
        self._reactor = reactor
        self._port = port
        self.factory = factory
        self.number = cast(IPv4Address, port.getHost()).port
        self._reserved: socket.socket | None = None

    @classmethod
    async def listen(cls, reactor: IReactor, agent: IProtocolFactory) -> VmPort:
        """Listen on any free port."""
        factory = SwitchableFactory(cast(AgentFactory, agent))
        port: IListeningPort = await TCP4ServerEndpoint(reactor, 0, interface=HOST).listen(factory)
        return cls(reactor, port, factory)

    def getHost(self) -> IPv4Address:
        return IPv4Address("TCP", HOST, self.number)

    async def refuse(self) -> None:
        """Refuse connections from now on."""
        if self._reserved is None:
            await maybeDeferred(self._port.stopListening)
            self._reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._reserved.bind((HOST, self.number))

    async def accept(self) -> None:
        """Accept connections from now on."""
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None
            endpoint = TCP4ServerEndpoint(self._reactor, self.number, interface=HOST)
            self._port = await endpoint.listen(self.factory)

    def startListening(self) -> None:
        """Do nothing: the port has been listening since it was made."""

    @deferred
    async def stopListening(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None
        else:
            await maybeDeferred(self._port.stopListening)
