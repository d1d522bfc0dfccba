# SPDX-License-Identifier: Apache-2.0
"""Deadlines for the peer: to begin HTTP/2, to show that it is alive, and to let the connection close."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.internet.interfaces import IDelayedCall

from txgrpc.timers import stop_timer

if TYPE_CHECKING:
    from txgrpc.connection import Connection

_PING = b"txgrpc\0\0"


class Deadlines:
    """A connection's one timer: first for the handshake, then for keepalive, finally for the close.

    :param keepalive: seconds of silence after which the peer is asked with a PING whether it is there; None:
        never.
    """

    __slots__ = ("_connection", "_keepalive", "_pinged", "_timer")

    def __init__(self, connection: Connection, keepalive: float | None) -> None:
        self._connection = connection
        self._keepalive = keepalive
        self._timer: IDelayedCall | None = None
        self._pinged: float | None = None

    def begin_handshake(self) -> None:
        """Expect the peer's SETTINGS."""
        limits = self._connection.limits
        self._timer = self._connection.reactor.callLater(limits.handshake_timeout, self._handshake_late)

    def begin_keepalive(self) -> None:
        """Expect a sign of life from now on."""
        self.stop()
        if self._keepalive is not None:
            self._timer = self._connection.reactor.callLater(self._keepalive, self._keep_alive)

    def begin_close(self) -> None:
        """Expect the transport to close."""
        self.stop()
        limits = self._connection.limits
        self._timer = self._connection.reactor.callLater(limits.close_timeout, self._close_late)

    def stop(self) -> None:
        """Cancel all deadlines."""
        timer, self._timer = self._timer, None
        stop_timer(timer)

    def _handshake_late(self) -> None:
        self._timer = None
        limits = self._connection.limits
        self._connection.abort(f"the peer did not begin HTTP/2 within {limits.handshake_timeout:g} s")

    def _close_late(self) -> None:
        self._timer = None
        self._connection.transport.abortConnection()

    def _keep_alive(self) -> None:
        self._timer = None
        connection, keepalive = self._connection, self._keepalive
        assert keepalive is not None  # otherwise nothing has begun this
        now, heard = connection.reactor.seconds(), connection.receiver.heard
        timeout = connection.limits.keepalive_timeout
        if self._pinged is not None and heard < self._pinged:
            connection.abort(f"the peer did not answer a PING within {timeout:g} s")
            return
        self._pinged = None
        wait = heard + keepalive - now
        if wait <= 0:
            wait = keepalive
            if connection.wants_keepalive():
                self._pinged = now
                connection.h2.ping(_PING)
                connection.flush()
                wait = timeout
        if connection.alive():  # the flush may have closed the connection
            self._timer = connection.reactor.callLater(wait, self._keep_alive)
