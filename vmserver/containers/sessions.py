# SPDX-License-Identifier: Apache-2.0
"""Flow control for the sessions of every ContainerProvider."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from twisted.internet.interfaces import IPushProducer
from zope.interface import implementer

from infranetes_common.concurrency import Notifier

#: Bytes of unread output beyond which the writer is paused.
HIGH_WATER = 256 * 1024
#: The most bytes of small pieces that are joined for one read.
JOINED_BYTES = 128 * 1024


class Output:
    """An async iterator of ("stdout" or "stderr", bytes), for one reader. Small pieces come joined.

    :param pause: called when too much is unread. :param resume: called when the reader has caught up.
    """

    def __init__(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        self._pause, self._resume = pause, resume
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._size = 0
        self._over = False
        self._failure: Exception | None = None
        self._changed = Notifier()
        self.paused = False

    def put(self, stream: str, data: bytes) -> None:
        """Add output of the process. Dropped after the end."""
        if self._over or not data:
            return
        self._waiting.append((stream, data))
        self._size += len(data)
        if self._size > HIGH_WATER and not self.paused:
            self.paused = True
            self._pause()
        self._changed.notify()

    def end(self) -> None:
        """End the iteration after the unread data. Idempotent."""
        self._over = True
        self._changed.notify()

    def fail(self, error: Exception) -> None:
        """Raise `error` in the reader, ahead of the unread data."""
        if self._failure is None:
            self._failure = error
        self.end()

    def __aiter__(self) -> Output:
        return self

    async def __anext__(self) -> tuple[str, bytes]:
        while not self._waiting and not self._over:
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure
        if not self._waiting:
            raise StopAsyncIteration
        stream, data = self._waiting.popleft()
        if self._waiting and len(data) < JOINED_BYTES:
            data = self._join(stream, data)
        self._size -= len(data)
        if self.paused and self._size < HIGH_WATER // 2:
            self.paused = False
            self._resume()
        return stream, data

    def _join(self, stream: str, data: bytes) -> bytes:
        """Add the following pieces of the same stream: each piece that is passed on takes time."""
        pieces, size = [data], len(data)
        while (
            self._waiting
            and self._waiting[0][0] == stream
            and size + len(self._waiting[0][1]) <= JOINED_BYTES
        ):
            pieces.append(self._waiting.popleft()[1])
            size += len(pieces[-1])
        return b"".join(pieces)


@implementer(IPushProducer)
class WriteGate:
    """Makes a coroutine write no faster than a transport sends.

    Register it as the transport's producer, and `wait` before each write."""

    def __init__(self) -> None:
        self._full = False
        self._opened = Notifier()

    async def wait(self) -> None:
        """Wait until the transport can take more, or is closed."""
        while self._full:
            await self._opened.wait()

    def pauseProducing(self) -> None:
        self._full = True

    def resumeProducing(self) -> None:
        self._full = False
        self._opened.notify()

    def stopProducing(self) -> None:
        self.resumeProducing()
