# SPDX-License-Identifier: Apache-2.0
"""The endpoint of a VM's agent at its own virtio-serial port, on the node a unix socket.

QEMU serves one connection at a time there, and the next once that is closed. What is written stays in the
socket until the guest has room for it, and the agent reads it.
"""

from __future__ import annotations

from pathlib import Path

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IStreamClientEndpoint
from twisted.internet.protocol import Factory
from zope.interface import implementer

from infranetes_common.concurrency import cancellable, start
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import IReactor
from infranetes_common.serial_session import SerialAddress, SessionOpener

_AGENT = SerialAddress("the agent, at its port")


@implementer(IStreamClientEndpoint)
class AgentPortEndpoint:
    """Opens a session with the agent for each connection. :param path: QEMU's socket."""

    def __init__(self, reactor: IReactor, path: Path) -> None:
        self._reactor = reactor
        self._path = path

    def connect(self, factory: IProtocolFactory) -> Deferred[IProtocol]:
        """See `IStreamClientEndpoint`. Fails with Unavailable or DeadlineExceeded."""
        return start(self._connect(factory))

    async def _connect(self, factory: IProtocolFactory) -> IProtocol:
        opener = SessionOpener(self._reactor, factory, _AGENT)
        openers = Factory.forProtocol(lambda: opener)
        openers.noisy = False
        try:
            await cancellable(UNIXClientEndpoint(self._reactor, str(self._path)).connect(openers))
        except CancelledError:
            raise
        except Exception as error:
            raise Unavailable(f"QEMU's socket {self._path} can't be reached: {error}") from error
        return await opener.opened
