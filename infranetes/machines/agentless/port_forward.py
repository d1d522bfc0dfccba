# SPDX-License-Identifier: Apache-2.0
"""Connections from the node to a guest's ports, as our agent's PortForward call has them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from infranetes.machines.agentless.opened_later import OpenedLater
from infranetes.machines.sessions import PortForwardCall
from infranetes_common.byte_connection import ByteConnection, connected
from infranetes_common.endpoints import tcp_endpoint
from infranetes_common.errors import InvalidArgument, Unavailable
from infranetes_common.reactors import IReactor
from infranetes_common.wire import vmserver

CONNECT_SECONDS = 10.0


class _GuestPort:
    """A connection to a port of the guest: an `AgentCall` whose first message has been sent."""

    def __init__(self, connection: ByteConnection) -> None:
        self._connection = connection

    async def send(self, request: vmserver.PortForwardInput) -> None:
        await self._connection.write(request.data)

    async def done_sending(self) -> None:
        self._connection.done_writing()

    def cancel(self) -> None:
        self._connection.abort()

    async def __aiter__(self) -> AsyncIterator[vmserver.PortForwardOutput]:
        with contextlib.suppress(Unavailable):  # reset: as an error, it would end clients' other connections
            while data := await self._connection.read():
                yield vmserver.PortForwardOutput(data=data)


def forwarded(reactor: IReactor, host: str) -> PortForwardCall:
    """Return a call that connects to the port of `host` that its first message names.

    It fails with Unavailable if nothing listens there."""

    async def opened(first: vmserver.PortForwardInput) -> PortForwardCall:
        if not 0 < first.port < 65536:
            raise InvalidArgument(f"{first.port} is no port: 1 to 65535 are")
        endpoint = tcp_endpoint(reactor, host, first.port, CONNECT_SECONDS)
        try:
            connection = await connected(endpoint, "the guest's port")
        except Exception as error:
            raise Unavailable(f"port {first.port} of the guest can't be reached: {error}") from None
        return _GuestPort(connection)

    return OpenedLater(opened)
