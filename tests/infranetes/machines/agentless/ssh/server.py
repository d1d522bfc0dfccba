# SPDX-License-Identifier: Apache-2.0
"""An SSH server in this process, by Conch, that does to its clients what a test wants."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, cast

from twisted.conch.ssh import connection, userauth
from twisted.conch.ssh.channel import SSHChannel
from twisted.conch.ssh.common import NS, getNS
from twisted.conch.ssh.factory import SSHFactory
from twisted.conch.ssh.keys import Key
from twisted.conch.ssh.service import SSHService
from twisted.conch.ssh.transport import SSHServerTransport
from twisted.internet.defer import maybeDeferred
from twisted.internet.interfaces import IListeningPort, IPullProducer
from twisted.internet.protocol import Factory, Protocol
from zope.interface import implementer

from infranetes.machines.agentless.ssh.access import Login
from infranetes.machines.agentless.ssh.keys import KeyPair, make_key
from infranetes.machines.agentless.ssh.transport import Silent
from infranetes_common.reactors import IReactor

Run = Callable[["Session", bytes], None]
"""Does what a command does."""


@implementer(IPullProducer)
class Flood:
    """Writes as much as the other side takes."""

    def __init__(self, transport: Any, write: Callable[[], None]) -> None:
        self.written = 0
        self._write = write
        transport.registerProducer(self, False)

    def resumeProducing(self) -> None:
        self.written += 1
        self._write()

    def stopProducing(self) -> None:
        self._write = lambda: None


class Session(SSHChannel):
    """A session of a client."""

    name = b"session"
    _log = Silent()

    def __init__(self, server: Server, window: int, packet: int) -> None:
        super().__init__(remoteWindow=window, remoteMaxPacket=packet)
        self._server = server
        self.requests: list[bytes] = []
        self.received = bytearray()
        self.begun = self.ended = False

    def request_exec(self, data: bytes) -> object:
        consent = self._server.consents()
        if consent is True:
            self._server.reactor.callLater(0, self._begin, getNS(data)[0])
        return consent

    def _begin(self, line: bytes) -> None:
        self.begun = True
        self._server.run(self, line)

    def requestReceived(self, requestType: bytes, data: bytes) -> Any:
        self.requests.append(requestType)
        return super().requestReceived(requestType, data)

    def dataReceived(self, data: bytes) -> None:
        self.received += data

    def eofReceived(self) -> None:
        self.ended = True

    def exit(self, code: int = 0) -> None:
        """End the command."""
        self.tell(b"exit-status", struct.pack(">L", code))
        self.loseConnection()

    def tell(self, request: bytes, data: bytes) -> None:
        """Send a request to the client."""
        self.conn.sendRequest(self, request, data)

    @property
    def tcp(self) -> Any:
        return self.conn.transport.transport

    def send(self, message: int, payload: bytes) -> None:
        """Send a message, as the client names this channel."""
        remote = struct.pack(">L", self.conn.channelsToRemoteChannel[self])
        self.conn.transport.sendPacket(message, remote + payload)


class Sessions(connection.SSHConnection):
    """A connection whose clients open sessions."""

    _log = Silent()

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server

    def ssh_CHANNEL_OPEN(self, packet: bytes) -> None:
        if self._server.answers_open:
            super().ssh_CHANNEL_OPEN(packet)

    def sendClose(self, channel: SSHChannel) -> None:
        if self._server.closes:
            super().sendClose(channel)

    def channel_session(self, window: int, packet: int, data: bytes) -> Session | None:
        if len(self.channels) >= self._server.most:
            return None
        session = Session(self._server, window, packet)
        session.localWindowSize = session.localWindowLeft = self._server.window
        session.localMaxPacket = self._server.max_packet
        self._server.sessions.append(session)
        return session


class _Authentication(SSHService):
    name = b"ssh-userauth"
    protocolMessages = userauth.SSHUserAuthServer.protocolMessages
    _log = Silent()
    transport: Any

    server: Server

    def ssh_USERAUTH_REQUEST(self, packet: bytes) -> None:
        user, _, method, _ = getNS(packet, 3)
        self.server.logins.append((user, method))
        if self.server.lets_in:
            self.transport.sendPacket(userauth.MSG_USERAUTH_SUCCESS, b"")
            self.transport.setService(Sessions(self.server))
        else:
            self.transport.sendPacket(userauth.MSG_USERAUTH_FAILURE, NS(b"publickey,password") + b"\0")


class _Transport(SSHServerTransport):
    _log = Silent()
    transport: Any
    gone = False

    def connectionMade(self) -> None:
        self.transport.setTcpNoDelay(True)
        super().connectionMade()

    def connectionLost(self, reason: Any = None) -> None:
        self.gone = True
        super().connectionLost(reason)


class Server(SSHFactory):
    """A server on a loopback port.

    :ivar run: what commands do. :ivar consents: whether they are begun.
    :ivar most: how many sessions a connection has. :ivar window, max_packet: what
        a session takes.
    """

    protocol = _Transport
    _log = Silent()

    def __init__(self, reactor: IReactor, run: Run = lambda session, line: None) -> None:
        self.user_key, self.host_key = make_key(), make_key()
        self.set_host_key(self.host_key)
        self.primes: dict[int, list[tuple[int, int]]] = {}
        self.reactor = reactor
        self.run = run
        self.consents: Callable[[], object] = lambda: True
        self.most, self.window, self.max_packet = 10, 131072, 32768
        self.answers_open = self.lets_in = self.closes = True
        self.sessions: list[Session] = []
        self.logins: list[tuple[bytes, bytes]] = []
        self.connections: list[_Transport] = []
        self._port: IListeningPort = reactor.listenTCP(0, cast(Any, self), interface="127.0.0.1")

    def set_host_key(self, key: KeyPair, proved_by: KeyPair | None = None) -> None:
        """Set the key that is shown, and the one that signs if that is another."""
        self.publicKeys = {b"ssh-ed25519": Key.fromString(key.public.encode())}
        self.privateKeys = {b"ssh-ed25519": Key.fromString((proved_by or key).private.encode())}

    def getService(self, transport: Any, service: bytes) -> Callable[[], SSHService]:
        def make() -> SSHService:
            made = _Authentication()
            made.server = self
            return made

        return make

    def buildProtocol(self, addr: Any) -> _Transport:
        made = cast(_Transport, super().buildProtocol(addr))
        self.connections.append(made)
        return made

    def startFactory(self) -> None:
        return  # Conch would read keys from files

    @property
    def login(self) -> Login:
        """How one logs in."""
        return login(self._port, self.user_key, self.host_key.public)

    async def stop(self) -> None:
        """End it and all its connections."""
        await maybeDeferred(self._port.stopListening)
        for each in self.connections:
            if each.transport is not None:
                each.transport.abortConnection()


def login(port: Any, user_key: KeyPair, host_key: str) -> Login:
    """Return how one logs in to a server on a loopback port."""
    return Login("127.0.0.1", "root", user_key.private, host_key, port.getHost().port)


class PlainServer(Factory):
    """A server of anything on a loopback port.

    :param say: called with each connection's transport.
    """

    noisy = False

    def __init__(self, reactor: IReactor, say: Callable[[Any], None]) -> None:
        self.made: list[Protocol] = []
        factory = self

        class Said(Protocol):
            def connectionMade(self) -> None:
                factory.made.append(self)
                say(self.transport)

        self.protocol = Said
        self._port: IListeningPort = reactor.listenTCP(0, cast(Any, self), interface="127.0.0.1")

    @property
    def login(self) -> Login:
        """How one logs in."""
        return login(self._port, make_key(), make_key().public)

    async def stop(self) -> None:
        """End it and all its connections."""
        await maybeDeferred(self._port.stopListening)
        for each in self.made:
            cast(Any, each.transport).abortConnection()
