# SPDX-License-Identifier: Apache-2.0
"""Handling of the peer's frames, a few at a time so that other work gets its turn of the reactor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from txgrpc.http2 import FrameGuard, OversizedFrame
from txgrpc.timers import stop_timer

if TYPE_CHECKING:
    from txgrpc.connection import Connection

log = Logger()

_TURN = 0.003  # seconds, after which the remaining data waits for the next reactor turn
#: Seconds. What comes sooner after the last data was handled may be of the same reactor turn: TLS hands over
#: each of its records by itself, and one turn can bring a thousand.
_SAME_TURN = 0.001


class Misbehaviour(Exception):
    """The peer did something that no honest peer does, and is disconnected."""


class Receiver:
    """Feeds h2 with received bytes, and the connection with h2's events.

    What could not be handled in a turn of the reactor is the backlog. Until that is done nothing more is
    read, and the loss of the connection is not reported. A turn in which some of the backlog was handled has
    had its share of work: what arrives in the same turn is handled in the next one.

    :ivar heard: when something last arrived, in the reactor's seconds.
    :ivar handling: whether frames are being handled, so that the output can be flushed once after them.
    """

    __slots__ = (
        "_backlog",
        "_begun",
        "_connection",
        "_guard",
        "_halted",
        "_handled",
        "_lost",
        "_turn",
        "_until",
        "handling",
        "heard",
    )

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._guard = FrameGuard(connection.client_side, connection.limits.max_frame)
        self._begun = bytearray()  # an incomplete frame, kept here because h2 would copy it with each piece
        self._backlog = b""
        self._handled = self.heard = connection.reactor.seconds()  # when the last frames were handled
        self._until = self.heard + _TURN  # when this turn's time is over
        self._halted = False  # reading is paused until the next turn
        self._turn: IDelayedCall | None = None
        self._lost: Failure | None = None  # why the connection was lost while there was a backlog
        self.handling = False

    def receive(self, data: bytes) -> None:
        """Handle received data, or add it to the backlog."""
        connection = self._connection
        now = self.heard = connection.reactor.seconds()
        if self._turn is not None:
            self._backlog += data
            return
        if now - self._handled >= _SAME_TURN:
            self._until = now + _TURN
        self._take(data)
        if self._handled >= self._until and not connection.closed:
            self._rest()

    def lost(self, reason: Failure) -> bool:
        """Note that the transport is lost. Return whether the backlog has to be handled first."""
        if self._turn is not None:
            self._lost = reason
        return self._lost is not None

    def resume(self) -> None:
        """Let the transport read again, if it was paused for the backlog's sake."""
        if self._halted:
            self._halted = False
            self._connection.transport.resumeProducing()

    def stop(self) -> None:
        """Drop the backlog."""
        self._backlog = b""
        self._begun.clear()
        self.handling = False
        if self._turn is not None and self._lost is None:
            stop_timer(self._turn)
            self._turn = None

    def _take(self, data: bytes) -> None:
        """Handle `data` as far as it goes in one turn of the reactor."""
        connection = self._connection
        seconds = connection.reactor.seconds
        at, size = 0, len(data)
        self.handling = True
        try:
            while at < size and not connection.closed:
                at = self._take_frames(data, at)
                self._handled = seconds()
                if self._handled >= self._until:
                    break
        finally:
            self.handling = False
        connection.flush()
        if at < size and not connection.closed:
            self._backlog = data[at:]

    def _rest(self) -> None:
        """Read and handle nothing more until the reactor's next turn."""
        connection = self._connection
        if not self._halted:
            self._halted = True
            connection.transport.pauseProducing()
        self._turn = connection.reactor.callLater(0, self._go_on)

    def _take_frames(self, data: bytes, at: int) -> int:
        """Handle the next few frames of `data`, from `at` on. Returns where the others begin."""
        connection = self._connection
        size = len(data)
        try:
            end = self._guard.check(data, at)
            if end - at < len(data):
                data = data[at:end]
            if self._guard.partial:
                self._begun += data
                return end
            if self._begun:
                data = bytes(self._begun + data)
                self._begun.clear()
            received = connection.h2.receive_data(data)
        except OversizedFrame as error:
            connection.cut_off(str(error), ErrorCodes.FRAME_SIZE_ERROR)
            return size
        except ProtocolError as error:
            code = getattr(error, "error_code", ErrorCodes.PROTOCOL_ERROR)
            connection.cut_off(str(error) or type(error).__name__, code)
            return size
        try:
            connection.handle(received)
        except Misbehaviour as error:
            connection.cut_off(str(error), ErrorCodes.ENHANCE_YOUR_CALM)
        return end

    def _go_on(self) -> None:
        """Handle the backlog in another turn, and the loss of the connection after all of it."""
        self._turn = None
        data, self._backlog = self._backlog, b""
        connection = self._connection
        self._until = connection.reactor.seconds() + _TURN
        if data:
            try:
                self._take(data)
            except Exception:
                log.failure("What {peer} sent can't be handled", peer=connection.transport.getPeer())
                connection.abort("the connection failed")
        lost = self._lost
        if lost is not None and not self._backlog:
            self._lost = None
            connection.end(lost)
        elif not connection.closed:
            if data:
                self._rest()
            else:
                self.resume()
