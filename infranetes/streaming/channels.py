"""Named byte streams over one upgraded connection, with backpressure both ways.

What the other side sends and nobody has read yet is bounded: past `MAX_UNREAD` bytes the connection is not
read on. What is written waits while the connection's own buffer is full. All of a connection's channels
share that, as SPDY's and WebSocket's do in Kubernetes.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IPushProducer
from zope.interface import implementer

#: Bytes received and not read, of all channels of a connection.
MAX_UNREAD = 256 * 1024


class ChannelClosed(Exception):
    """The channel or its connection is gone; nothing more can be written."""


class Framing(Protocol):
    """How a connection's wire format carries channels."""

    def send(self, channel: Channel, data: bytes) -> None:
        """Write `data` on the channel."""

    def finish(self, channel: Channel) -> None:
        """Say that nothing more is written on the channel, where the format can."""

    def reset(self, channel: Channel) -> None:
        """End the channel both ways, where the format can."""


@implementer(IPushProducer)
class Flow:
    """The backpressure of one transport: when it may be read and written."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._unread = 0
        self._reading = True
        self._full = False
        self._waiting: list[Deferred[None]] = []
        self.lost = False
        transport.registerProducer(self, True)

    async def writable(self) -> None:
        """Wait until there is room to write.

        :raise ChannelClosed: the connection is lost.
        """
        while self._full and not self.lost:
            room: Deferred[None] = Deferred()
            self._waiting.append(room)
            await room
        if self.lost:
            raise ChannelClosed

    def received(self, count: int) -> None:
        """So many more bytes wait to be read."""
        self._unread += count
        if self._reading and self._unread > MAX_UNREAD:
            self._reading = False
            self._transport.pauseProducing()

    def consumed(self, count: int) -> None:
        """So many bytes have been read."""
        self._unread -= count
        if not self._reading and self._unread <= MAX_UNREAD // 2:
            self._reading = True
            if not self.lost:
                self._transport.resumeProducing()

    def connection_lost(self) -> None:
        """Nothing will be written any more."""
        self.lost = True
        self.resumeProducing()

    def pauseProducing(self) -> None:
        self._full = True

    def resumeProducing(self) -> None:
        self._full = False
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.called:
                each.callback(None)

    def stopProducing(self) -> None:
        self.connection_lost()


class Channel:
    """One stream.

    :ivar name: ``stdin``, ``error``, ... :ivar key: the framing's own number of it.
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
        self._ended = False  # they write no more
        self._finished = False  # we write no more
        self._reader: Deferred[None] | None = None

    @property
    def done(self) -> bool:
        """Whether neither side writes any more."""
        return self._ended and self._finished

    async def read(self) -> bytes:
        """The next bytes, in the pieces in which they came; ``b""`` at the end, then always. One reader."""
        while not self._unread and not self._ended:
            self._reader = Deferred()
            await self._reader
        if not self._unread:
            return b""
        data = self._unread.popleft()
        self._flow.consumed(len(data))
        return data

    async def write(self, data: bytes) -> None:
        """Write, waiting for room first.

        :raise ChannelClosed: the channel was finished or reset, or the connection is lost.
        """
        await self._flow.writable()
        if self._finished:
            raise ChannelClosed
        self._framing.send(self, data)

    def finish(self) -> None:
        """Write no more. Twice is once."""
        if not self._finished:
            self._finished = True
            if not self._flow.lost:
                self._framing.finish(self)

    def reset(self) -> None:
        """End it both ways, dropping what is unread. After the end: nothing."""
        self.drop()
        if not (self._finished and self._ended) and not self._flow.lost:
            self._framing.reset(self)
        self._finished = True
        self.end()

    def drop(self) -> None:
        """Forget what is unread."""
        self._flow.consumed(sum(map(len, self._unread)))
        self._unread.clear()

    # For the framing

    def feed(self, data: bytes) -> None:
        """The other side wrote this."""
        if self._ended or not data:
            return
        self._unread.append(data)
        self._flow.received(len(data))
        self._wake()

    def end(self, *, writing: bool = False) -> None:
        """The other side writes no more; with `writing`, neither can we."""
        self._ended = True
        self._finished = self._finished or writing
        self._wake()

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.called:
            reader.callback(None)
