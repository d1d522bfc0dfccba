# SPDX-License-Identifier: Apache-2.0
"""One TCP connection to a port of the pod."""

from __future__ import annotations

from twisted.internet.endpoints import TCP4ClientEndpoint, TCP6ClientEndpoint, connectProtocol
from twisted.internet.error import ConnectError
from twisted.internet.interfaces import IReactorTCP

from infranetes_common.errors import Unavailable
from vmserver.containers.session_connection import SessionConnection

CONNECT_SECONDS = 10.0


class ForwardedConnection(SessionConnection):
    """A connection to a process of the pod. That it was reset is an end as any other.

    Told of an error, kubectl and crictl give up the other connections of a port-forward too."""

    _ended = False  # whether the other side has ended its half

    def connectionMade(self) -> None:
        self.transport.setTcpNoDelay(True)
        super().connectionMade()

    def dataReceived(self, data: bytes) -> None:
        self.output.put("data", data)

    def readConnectionLost(self) -> None:
        self._ended = True
        super().readConnectionLost()

    def close(self) -> None:
        """Close both directions. After `finish`, or the other side's end, all data is still sent; else the
        connection is reset.

        Idempotent.
        """
        if self._lost:
            return
        if self._finished or self._ended:
            self.transport.loseConnection()
        else:
            self.transport.abortConnection()


async def connect(reactor: IReactorTCP, port: int) -> ForwardedConnection:
    """Connect to this machine's `port`; containers share the machine's network.

    :raise Unavailable: nothing listens there, or it does not answer.
    """
    refusals = []
    for endpoint in (TCP4ClientEndpoint, TCP6ClientEndpoint):
        host = "127.0.0.1" if endpoint is TCP4ClientEndpoint else "::1"
        try:
            connection: ForwardedConnection = await connectProtocol(
                endpoint(reactor, host, port, timeout=CONNECT_SECONDS), ForwardedConnection()
            )
        except ConnectError as error:
            refusals.append(f"{host}: {error}")
        else:
            return connection
    raise Unavailable(f"nothing in the pod listens on port {port} ({'; '.join(refusals)})")
