# SPDX-License-Identifier: Apache-2.0
"""A connection that carries a session's bytes, with flow control in both directions."""

from __future__ import annotations

from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Protocol, connectionDone
from twisted.internet.tcp import Connection
from twisted.python.failure import Failure
from zope.interface import implementer

from vmserver.containers.sessions import Output, WriteGate

READ_BYTES = 128 * 1024  # per reactor turn


@implementer(IHalfCloseableProtocol)
class SessionConnection(Protocol):
    """A connection whose two directions end independently.

    A subclass puts received data into `output`.

    :ivar output: the other side's data, until it ends its direction.
    """

    transport: Connection

    def __init__(self) -> None:
        self._gate = WriteGate()
        self._finished = False
        self._lost = False
        self.output = Output(self._pause, self._resume)

    def connectionMade(self) -> None:
        self.transport.bufferSize = READ_BYTES
        self.transport.registerProducer(self._gate, True)

    def readConnectionLost(self) -> None:
        self.output.end()

    def writeConnectionLost(self) -> None:
        self._gate.stopProducing()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._lost = True
        self._gate.stopProducing()
        self.output.end()

    def _pause(self) -> None:
        if not self._lost:
            self.transport.pauseProducing()

    def _resume(self) -> None:
        if not self._lost:
            self.transport.resumeProducing()

    async def write(self, data: bytes) -> None:
        """Write, and wait until more may be written. Dropped after the end."""
        if not self._finished and not self._lost:
            self.transport.write(data)
            await self._gate.wait()

    def finish(self) -> None:
        """End our direction; output still arrives. Idempotent."""
        if not self._finished and not self._lost:
            self._finished = True
            self.transport.unregisterProducer()
            self.transport.loseWriteConnection()
