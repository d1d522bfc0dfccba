# SPDX-License-Identifier: Apache-2.0
"""Named byte streams over one upgraded connection, with backpressure both ways.

What the client sends and nobody has read yet is bounded: past `MAX_UNREAD` bytes the connection is read no
further. Writing waits while the connection's own buffer is full. All of a connection's channels share that,
as SPDY's and WebSocket's do in Kubernetes. Answers to the client's frames (pings, refused streams) can't
wait: if the buffer is full, nothing more is read until the client has taken them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from twisted.internet.interfaces import IPushProducer
from zope.interface import implementer

from infranetes_common.concurrency import Notifier
from infranetes_common.transports import StreamTransport

#: The most bytes that all channels of a connection have received and not read.
MAX_UNREAD = 256 * 1024
#: What each unread piece counts besides its bytes.
PIECE = 64
#: The most bytes that a reader is given at once.
MAX_READ = 128 * 1024


class ChannelClosed(Exception):
    """The channel or its connection is gone; nothing more can be written."""


class Framing(Protocol):
    """The wire format by which a connection carries channels."""

    def send(self, channel: Channel, data: bytes) -> None:
        """Write `data` on the channel."""

    def finish(self, channel: Channel) -> None:
        """Say that nothing more is written on the channel, where the format can."""

    def reset(self, channel: Channel) -> None:
        """End the channel both ways, where the format can."""


@implementer(IPushProducer)
class Flow:
    """The backpressure of one transport: when it may be read and written.

    :param go_on: is called when it may be read again; it has to resume the transport.
    :ivar reading: whether what comes in may be handled. :ivar full: whether the transport's buffer is full.
    """

    def __init__(self, transport: StreamTransport, go_on: Callable[[], None] | None = None) -> None:
        self._transport = transport
        self._go_on = go_on or transport.resumeProducing
        self._unread = 0
        self._behind = False  # too much is unread
        self._unheard = False  # the client has yet to take what was written before an answer to it
        self.reading = True
        self.full = False
        self._room = Notifier()
        self.lost = False
        transport.registerProducer(self, True)

    async def writable(self) -> None:
        """Wait until there is room to write.

        :raise ChannelClosed: the connection is lost.
        """
        while self.full and not self.lost:
            await self._room.wait()
        if self.lost:
            raise ChannelClosed

    def received(self, count: int) -> None:
        """Count bytes that came in and wait to be read."""
        self._unread += count
        if self._unread > MAX_UNREAD:
            self._behind = True
            self._update()

    def consumed(self, count: int) -> None:
        """Count bytes that have been read."""
        self._unread -= count
        if self._behind and self._unread <= MAX_UNREAD // 2:
            self._behind = False
            self._update()

    def answered(self) -> None:
        """Note that a frame was answered, which could not wait for room."""
        if self.full:
            self._unheard = True
            self._update()

    def _update(self) -> None:
        reading = not (self._behind or self._unheard)
        if reading is not self.reading:
            self.reading = reading
            if not self.lost:
                self._go_on() if reading else self._transport.pauseProducing()

    def connection_lost(self) -> None:
        """Wake all writers: nothing can be written any more."""
        self.lost = True
        self.resumeProducing()

    def pauseProducing(self) -> None:
        self.full = True

    def resumeProducing(self) -> None:
        self.full = self._unheard = False
        self._update()
        self._room.notify()

    def stopProducing(self) -> None:
        self.connection_lost()


class Channel:
    """One stream of a connection.

    :ivar name: ``stdin``, ``error``, ... :ivar key: its number in the framing.
    :ivar headers: what it was opened with.
    """

    def __init__(
        self, flow: Flow, framing: Framing, name: str, key: int, headers: dict[str, str] | None = None
    ) -> None:
        self.name = name
        self.key = key
        self.headers = headers or {}
        self._flow = flow
        self._framing = framing
        self._unread: deque[bytes] = deque()
        self._ended = False  # the client writes no more
        self._finished = False  # we write no more
        self._arrival = Notifier()

    @property
    def done(self) -> bool:
        """Whether neither side writes any more."""
        return self._ended and self._finished

    async def read(self) -> bytes:
        """Return the next bytes, waiting for some; ``b""`` at the end, and always after it."""
        while not self._unread and not self._ended:
            await self._arrival.wait()
        if not self._unread:
            return b""
        pieces = [self._unread.popleft()]
        size = len(pieces[0])
        while self._unread and size + len(self._unread[0]) <= MAX_READ:
            pieces.append(self._unread.popleft())
            size += len(pieces[-1])
        self._flow.consumed(size + PIECE * len(pieces))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def write(self, data: bytes) -> None:
        """Write once there is room.

        :raise ChannelClosed: the channel was finished or reset, or the connection is lost.
        """
        await self._flow.writable()
        if self._finished:
            raise ChannelClosed
        self._framing.send(self, data)

    def finish(self) -> None:
        """Write no more. Idempotent."""
        if not self._finished:
            self._finished = True
            if not self._flow.lost:
                self._framing.finish(self)

    def reset(self) -> None:
        """End it both ways and drop what is unread. Idempotent."""
        self.drop()
        if not (self._finished and self._ended) and not self._flow.lost:
            self._framing.reset(self)
        self._finished = True
        self.end()

    def drop(self) -> None:
        """Drop what is unread."""
        count = sum(map(len, self._unread)) + PIECE * len(self._unread)
        self._unread.clear()
        self._flow.consumed(count)

    # For the framing

    def feed(self, data: bytes) -> None:
        """Take in what the client wrote."""
        if self._ended or not data:
            return
        self._unread.append(data)
        self._flow.received(len(data) + PIECE)
        self._arrival.notify()

    def end(self, *, writing: bool = False) -> None:
        """Note that the client writes no more; with `writing`, that we can't either."""
        self._ended = True
        self._finished = self._finished or writing
        self._arrival.notify()
