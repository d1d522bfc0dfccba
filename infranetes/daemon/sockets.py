# SPDX-License-Identifier: Apache-2.0
"""gRPC servers on unix sockets."""

from __future__ import annotations

import os
from collections.abc import Callable

from twisted.application.service import Service
from twisted.internet.defer import maybeDeferred
from twisted.internet.endpoints import UNIXServerEndpoint
from twisted.internet.interfaces import IListeningPort

from infranetes_common.concurrency import deferred
from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import IReactor
from txgrpc import Server


class SocketService(Service):
    """Listens on a unix socket while it runs, and lets the calls end when it stops.

    :param mode: the socket's permissions. :param drain_seconds: how long calls may still run at the end.
    :param end_streams: ends the calls that would never end by themselves.
    """

    def __init__(
        self,
        reactor: IReactor,
        path: str,
        mode: int,
        server: Server,
        drain_seconds: float,
        end_streams: Callable[[], None] = lambda: None,
    ) -> None:
        self._reactor = reactor
        self._path = path
        self._mode = mode
        self._server = server
        self._drain_seconds = drain_seconds
        self._end_streams = end_streams
        self._ports: list[IListeningPort] = []

    @deferred
    async def startService(self) -> None:
        """Listen.

        :raise FailedPrecondition: the path can't be listened on."""
        Service.startService(self)
        endpoint = UNIXServerEndpoint(self._reactor, self._path, mode=self._mode)
        before = os.umask(0o777 & ~self._mode)  # so that the socket never admits anyone else
        try:
            listening = endpoint.listen(self._server.factory)
        finally:
            os.umask(before)
        try:
            self._ports.append(await listening)
        except Exception as error:
            raise FailedPrecondition(f"the socket {self._path} can't be listened on: {error}") from None

    @deferred
    async def stopService(self) -> None:
        """Stop listening, and drain."""
        Service.stopService(self)
        while self._ports:
            await maybeDeferred(self._ports.pop().stopListening)
        self._end_streams()
        await self._server.drain(self._drain_seconds)
