# SPDX-License-Identifier: Apache-2.0
"""The keyboard of a VM's serial console: one connection, which is kept for as long as somebody types.

QEMU takes what is typed only as fast as the guest reads its serial port. What it writes on this connection is
dropped at once, since a peer that reads nothing would keep QEMU from writing the console's file.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import cast

from twisted.internet.defer import CancelledError, Deferred, DeferredLock
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.interfaces import IDelayedCall, IPullProducer
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes_common.concurrency import cancellable, shielded
from infranetes_common.errors import ResourceExhausted, Unavailable
from infranetes_common.reactors import IReactor
from infranetes_common.transports import UnixTransport

MOST = 64 * 1024  # bytes that wait
_IDLE_SECONDS = 60.0
_BUFFER = 4096  # of the kernel, which is not to hide that nothing is taken


@implementer(IPullProducer)
class _Connection(Protocol):
    """The connection. :param heard: is called when the guest has written something."""

    transport: UnixTransport | None

    def __init__(self, heard: Callable[[], None]) -> None:
        self._heard = heard
        self._taken: Deferred[None] | None = None
        self.lost = False

    def connectionMade(self) -> None:
        assert self.transport is not None
        handle = cast(socket.socket, self.transport.getHandle())
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self.transport.registerProducer(self, False)

    def send(self, data: bytes) -> Deferred[None]:
        """Send; fires when all of it is with the kernel. One call at a time."""
        if self.lost:
            raise Unavailable("the VM has ended")
        self._taken = Deferred()
        assert self.transport is not None
        self.transport.write(data)
        return self._taken

    def resumeProducing(self) -> None:
        taken, self._taken = self._taken, None
        if taken is not None:
            taken.callback(None)

    def stopProducing(self) -> None:
        pass

    def dataReceived(self, data: bytes) -> None:
        self._heard()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.lost = True
        taken, self._taken = self._taken, None
        if taken is not None:
            taken.errback(Unavailable("the VM ended before its guest had read what was typed"))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if not self.lost and self.transport is not None:
            self.transport.abortConnection()


class Keyboard:
    """The keyboard at QEMU's socket `path`. :param heard: is called when the guest has written something."""

    def __init__(self, reactor: IReactor, path: Path, heard: Callable[[], None]) -> None:
        self._reactor = reactor
        self._path = path
        self._heard = heard
        self._turn = DeferredLock()
        self._waiting = 0
        self._connection: _Connection | None = None
        self._idle: IDelayedCall | None = None

    async def type(self, data: bytes) -> None:
        """Type; returns when it is taken, in the order of the calls.

        :raise ResourceExhausted: the guest takes nothing. :raise Unavailable: the VM does not run."""
        if not data:
            return
        if self._waiting + len(data) > MOST:
            raise ResourceExhausted(
                f"the guest does not read its console: {self._waiting} bytes wait, and {MOST} may"
            )
        await shielded(self._type(data))

    async def _type(self, data: bytes) -> None:
        self._waiting += len(data)
        try:
            async with self._turn:
                await (await self._connected()).send(data)
        finally:
            self._waiting -= len(data)
        self._rest()

    async def _connected(self) -> _Connection:
        if self._connection is None or self._connection.lost:
            connection = _Connection(self._heard)
            factory = Factory.forProtocol(lambda: connection)
            factory.noisy = False
            try:
                await cancellable(UNIXClientEndpoint(self._reactor, str(self._path)).connect(factory))
            except CancelledError:
                raise
            except Exception as error:
                raise Unavailable(f"the VM's console can't be typed into: {error}") from error
            self._connection = connection
        return self._connection

    def _rest(self) -> None:
        """Close the connection once nobody has typed for a while."""
        if self._idle is not None and self._idle.active():
            self._idle.reset(_IDLE_SECONDS)
        else:
            self._idle = self._reactor.callLater(_IDLE_SECONDS, self._drop)

    def _drop(self) -> None:
        if self._waiting:
            self._rest()
        elif self._connection is not None:
            self._connection.close()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._idle is not None and self._idle.active():
            self._idle.cancel()
        if self._connection is not None:
            self._connection.close()
