# SPDX-License-Identifier: Apache-2.0
"""The daemon's connections to agents, whose packets have a mark by which the node lets them out.

Who may make pods can have kubelet connect to any address and port, since a probe names both. Programs in the
node's own network, such as pods with hostNetwork, could connect as well. To an agent they would all be its
node. To mark a packet takes CAP_NET_ADMIN.
"""

from __future__ import annotations

import contextlib
import socket
from typing import cast

from twisted.internet import tcp
from twisted.internet.interfaces import IConnector, IReactorTCP, IStreamClientEndpoint
from twisted.internet.protocol import ClientFactory
from zope.interface import directlyProvides, providedBy

from infranetes_common.endpoints import tcp_endpoint
from infranetes_common.identity import AGENT_MARK
from infranetes_common.reactors import IReactor


class _Client(tcp.Client):
    def createInternetSocket(self) -> socket.socket:
        connection: socket.socket = super().createInternetSocket()  # type: ignore[no-untyped-call]
        # A daemon that may not mark packets may not make the rules either, by which others are dropped.
        with contextlib.suppress(PermissionError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, AGENT_MARK)
        return connection


class _Connector(tcp.Connector):
    def _makeTransport(self) -> tcp.Client:
        return _Client(self.host, self.port, self.bindAddress, self, self.reactor)  # type: ignore[no-untyped-call]


class _Reactor:
    """A reactor whose TCP connections are marked."""

    def __init__(self, reactor: IReactor) -> None:
        self._reactor = reactor
        directlyProvides(self, providedBy(reactor))

    def __getattr__(self, name: str) -> object:
        attribute: object = getattr(self._reactor, name)
        return attribute

    def connectTCP(
        self,
        host: str,
        port: int,
        factory: ClientFactory,
        timeout: float = 30,
        bindAddress: tuple[str, int] | None = None,
    ) -> IConnector:
        connector = _Connector(host, port, factory, timeout, bindAddress, self._reactor)
        connector.connect()
        return connector


def marked_endpoint(reactor: IReactor, host: str, port: int, seconds: float) -> IStreamClientEndpoint:
    """Return the endpoint of an agent. :param seconds: for a connection to be made."""
    return tcp_endpoint(cast(IReactorTCP, _Reactor(reactor)), host, port, seconds)
