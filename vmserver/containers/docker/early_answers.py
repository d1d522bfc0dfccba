# SPDX-License-Identifier: Apache-2.0
"""Connections on which an answer may come before the request's body has been written.

An engine that can't take an image says why and closes the connection, whatever is still to be sent. Once
Twisted's client has an answer's header, it stops reading until the request is written. Here that never
happens: the connection is lost first, and the reason with it. So these connections are read all the time,
and once more when a write fails because the engine has closed the connection since the reactor looked at it.
The client keeps what it has not been asked for; the engine's answer to an upload is short.
"""

from __future__ import annotations

from typing import cast

from twisted.internet.interfaces import IProtocol, IProtocolFactory, IStreamClientEndpoint, ITransport
from twisted.internet.tcp import Connection
from twisted.protocols.policies import ProtocolWrapper, WrappingFactory
from zope.interface import implementer

from infranetes_common.concurrency import deferred


class _Reading(ProtocolWrapper):
    """A connection that is always read."""

    def makeConnection(self, transport: ITransport) -> None:
        connection = cast(Connection, transport)
        write = connection.writeSomeData

        def write_or_read(data: bytes) -> int | Exception:
            written: int | Exception = write(data)
            if isinstance(written, Exception):
                connection.doRead()
            return written

        connection.writeSomeData = write_or_read  # type: ignore[assignment,method-assign]
        super().makeConnection(transport)  # type: ignore[no-untyped-call]

    def pauseProducing(self) -> None:
        """Do nothing."""


class _Factory(WrappingFactory):
    noisy = False
    protocol = _Reading


@implementer(IStreamClientEndpoint)
class ReadingEndpoint:
    """An endpoint whose connections are read at any time."""

    def __init__(self, endpoint: IStreamClientEndpoint) -> None:
        self._endpoint = endpoint

    @deferred
    async def connect(self, protocolFactory: IProtocolFactory) -> IProtocol:
        """See `IStreamClientEndpoint.connect`."""
        # Twisted's WrappingFactory has no type annotations.
        wrapping = _Factory(protocolFactory)  # type: ignore[no-untyped-call]
        reading = cast(ProtocolWrapper, await self._endpoint.connect(wrapping))
        return reading.wrappedProtocol
