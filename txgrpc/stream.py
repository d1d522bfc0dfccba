# SPDX-License-Identifier: Apache-2.0
"""One call on an HTTP/2 stream: the part that the server's and client's sides share."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from h2.errors import ErrorCodes
from twisted.internet.defer import Deferred

from txgrpc.framing import FramingError, frame
from txgrpc.inbox import Inbox
from txgrpc.metadata import Headers
from txgrpc.states import State, Step, advance
from txgrpc.status import GrpcError

if TYPE_CHECKING:
    from txgrpc.connection import Connection


class Chunk:
    """Bytes that wait to be sent; `sent` fires when all are handed over."""

    __slots__ = ("data", "end", "sent")

    def __init__(self, data: memoryview, end: bool) -> None:
        self.data = data
        self.end = end
        self.sent: Deferred[None] = Deferred()


def _ignore(_: object) -> None:
    """Drop a failure that its waiters have already received."""


class Stream:
    """A call's two halves, its received messages and its queue of data to send.

    The connection calls the methods named ``..._received``, ``was_reset`` and ``abandon``.
    """

    __slots__ = ("_reader", "connection", "failure", "id", "inbox", "outbox", "receiving", "sending")

    def __init__(self, connection: Connection, stream_id: int, max_message: int | None = None) -> None:
        self.connection = connection
        self.id = stream_id
        limits = connection.limits
        most = limits.max_receive_message if max_message is None else max_message
        self.inbox = Inbox(most, limits.stream_window, connection.assembling)
        self.outbox: deque[Chunk] | None = None  # only while something waits: calls that wait are many
        self.sending = State.IDLE
        self.receiving = State.IDLE
        #: Why nothing more will be received or sent. Messages received before it can still be taken.
        self.failure: GrpcError | None = None
        self._reader: Deferred[None] | None = None

    # Receiving

    def data_received(self, data: bytes, flow_length: int) -> None:
        """Take in a DATA frame."""
        if self.receiving is not State.OPEN:
            return  # we have ended the half, and this frame was in flight
        try:
            self.inbox.receive(data, flow_length)
        except FramingError as error:
            self.refused(error)
            return
        self.give_credit()
        if self.inbox:
            self.receiving = advance(self.receiving, Step.MESSAGE)
            self._wake()

    def response_received(self, headers: Headers, ended: bool) -> None:
        """Take in a response's headers; with `ended` they are its trailers too. For clients."""

    def trailers_received(self, headers: Headers) -> None:
        """Take in the headers that end the other side's half. Servers ignore a client's."""

    def end_received(self) -> None:
        """Take in the other side's END_STREAM."""
        if self.receiving <= State.OPEN:
            self.receiving = advance(self.receiving, Step.END)
        self._wake()
        self.connection.release(self)

    def refused(self, error: FramingError) -> None:
        """End the call: the other side's bytes are not messages, or the messages are too large."""
        raise NotImplementedError

    def was_reset(self, error_code: int) -> None:
        """Take in the other side's RST_STREAM."""
        raise NotImplementedError

    def abandon(self, error: GrpcError) -> None:
        """End the call: the connection is lost."""
        raise NotImplementedError

    async def receive(self) -> bytes | None:
        """Return the next message; None after the last.

        :raise GrpcError: the call failed before.
        """
        inbox = self.inbox
        while True:
            message = inbox.take()
            if message is not None:
                inbox.awaited = False
                self.give_credit()
                return message
            if self.failure is not None:
                raise self.failure
            if self.receiving >= State.ENDED:
                return None
            if self._reader is not None:
                raise RuntimeError("another coroutine waits for this call's next message already")
            inbox.awaited = True
            self.give_credit()
            self._reader = Deferred(self._stop_reading)
            await self._reader

    def _stop_reading(self, _: Deferred[None]) -> None:
        self._reader = None
        self.inbox.awaited = False

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.callback(None)

    def give_credit(self) -> None:
        """Return window to the other side for the messages that were taken."""
        if self.receiving is State.OPEN:
            credit = self.inbox.credit(self.give_credit)
            if credit:
                self.connection.open_window(self.id, credit)

    def widen(self, window: int) -> None:
        """Let the other side be `window` bytes ahead of the reader. Never lowers the present window."""
        if self.receiving <= State.OPEN:
            more = self.inbox.widen(window)
            if more:
                self.connection.open_window(self.id, more)

    # Sending

    def send_headers(self, headers: Headers) -> None:
        """Send the first headers of our half."""
        self.sending = advance(self.sending, Step.HEADERS)
        self.connection.send_headers(self.id, headers, end=False)

    def send(self, *payloads: bytes, end: bool = False) -> Deferred[None] | None:
        """Send a message, or several. The Deferred fires when the next may follow; None: at once."""
        self.sending = advance(self.sending, Step.MESSAGE)
        if end:
            self.sending = advance(self.sending, Step.END)
        data = frame(payloads[0]) if len(payloads) == 1 else b"".join(map(frame, payloads))
        return self.connection.send_data(self, data, end)

    def send_end(self) -> Deferred[None] | None:
        """Half-close without trailers, after the queued data is sent."""
        self.sending = advance(self.sending, Step.END)
        return self.connection.send_data(self, b"", end=True)

    def send_trailers(self, headers: Headers) -> None:
        """End our half with `headers`, and drop the queued data."""
        self.sending = advance(self.sending, Step.END)
        self.drop_unsent()
        self.connection.send_headers(self.id, headers, end=True)
        self.connection.release(self)

    def drop_unsent(self) -> None:
        """Drop the queued data, and cancel the Deferreds that wait for it."""
        outbox, self.outbox = self.outbox, None
        for chunk in outbox or ():
            chunk.sent.addErrback(_ignore)
            chunk.sent.cancel()

    # Ending

    def reset(self, error_code: ErrorCodes) -> None:
        """End both halves now, on the other side too."""
        if self.sending < State.ENDED or self.receiving < State.ENDED:
            self.over()
            self.connection.send_reset(self.id, error_code)
        self.connection.release(self)

    def over(self, failure: GrpcError | None = None) -> None:
        """End both halves, and wake all who wait for either."""
        self.sending = advance(self.sending, Step.RESET)
        self.receiving = advance(self.receiving, Step.RESET)
        if self.failure is None:
            self.failure = failure
        self.drop_unsent()
        self.inbox.stop()
        self._wake()

    @property
    def finished(self) -> bool:
        """True once both halves are over and everything queued has been sent."""
        return self.sending >= State.ENDED and self.receiving >= State.ENDED and not self.outbox
