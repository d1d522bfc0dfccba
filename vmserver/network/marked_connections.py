# SPDX-License-Identifier: Apache-2.0
"""The agent's own connections, whose packets have a mark of the kernel's by which its firewall accepts them.

Containers share the machine's network, and may be root in it. Marking a packet takes CAP_NET_ADMIN, which
only privileged containers have: those could open the firewall as well.
"""

from __future__ import annotations

import socket

from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IAddress, IProtocol, IProtocolFactory, IStreamClientEndpoint
from twisted.internet.protocol import Protocol, ServerFactory
from twisted.web.client import URI
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer

from infranetes_common.concurrency import run_in_thread, start
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import IReactor

MARK = 0x1F4E7E51  # never the number of an endpoint: with those the service proxy marks packets
_SECONDS = 5.0


class _Adopted(ServerFactory):
    """Gives an adopted connection the protocol that was made for it."""

    def __init__(self, protocol: Protocol) -> None:
        self._made = protocol

    def buildProtocol(self, addr: IAddress | None) -> Protocol:
        return self._made


@implementer(IStreamClientEndpoint)
class _MarkedEndpoint:
    def __init__(self, reactor: IReactor, host: str, port: int) -> None:
        self._reactor = reactor
        self._host = host
        self._port = port

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        return start(self._connect(protocolFactory))

    async def _connect(self, factory: IProtocolFactory) -> IProtocol:
        connected = await run_in_thread(self._reactor, _thd_connect, self._host, self._port)
        with connected:  # the reactor has a duplicate of the descriptor
            connected.setblocking(False)
            protocol = factory.buildProtocol(IPv4Address("TCP", self._host, self._port))
            assert isinstance(protocol, Protocol)
            self._reactor.adoptStreamConnection(connected.fileno(), socket.AF_INET, _Adopted(protocol))
        found: IProtocol = protocol
        return found


@implementer(IAgentEndpointFactory)
class MarkedEndpoints:
    """The endpoints of a `twisted.web.client.Agent` that connects to IPv4 addresses, with `MARK`."""

    def __init__(self, reactor: IReactor) -> None:
        self._reactor = reactor

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:
        endpoint: IStreamClientEndpoint = _MarkedEndpoint(self._reactor, uri.host.decode("ascii"), uri.port)
        return endpoint


def _thd_connect(host: str, port: int) -> socket.socket:
    """Connect a marked socket. :raise Unavailable: nothing answers, or the agent may not mark packets."""
    connecting = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        connecting.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
        connecting.settimeout(_SECONDS)
        connecting.connect((host, port))
    except OSError as error:
        connecting.close()
        raise Unavailable(f"{host}:{port} can't be reached: {error}") from error
    return connecting
