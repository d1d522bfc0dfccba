"""What sessions of every ContainerProvider are made of: output and input at the pace of who takes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IPushProducer
from zope.interface import implementer

#: Bytes of output that wait for their reader before the writer is paused.
HIGH_WATER = 256 * 1024


class Output:
    """An async iterator of ("stdout" or "stderr", bytes). One reader.

    :param pause: is called when too much waits; `resume` when the reader has caught up.
    """

    def __init__(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        self._pause, self._resume = pause, resume
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._size = 0
        self._over = False
        self._failure: Exception | None = None
        self._wake: Deferred[None] | None = None
        self.paused = False

    def put(self, stream: str, data: bytes) -> None:
        """The session has written this. After the end: dropped."""
        if self._over or not data:
            return
        self._waiting.append((stream, data))
        self._size += len(data)
        if self._size > HIGH_WATER and not self.paused:
            self.paused = True
            self._pause()
        self._notify()

    def end(self) -> None:
        """Nothing more will come. Twice is once."""
        self._over = True
        self._notify()

    def fail(self, error: Exception) -> None:
        """It broke: the reader gets the error at once."""
        if self._failure is None:
            self._failure = error
        self.end()

    def _notify(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None and not wake.called:
            wake.callback(None)

    def __aiter__(self) -> Output:
        return self

    async def __anext__(self) -> tuple[str, bytes]:
        while not self._waiting and not self._over:
            self._wake = Deferred()
            await self._wake
        if self._failure is not None:
            raise self._failure
        if not self._waiting:
            raise StopAsyncIteration
        stream, data = self._waiting.popleft()
        self._size -= len(data)
        if self.paused and self._size < HIGH_WATER // 2:
            self.paused = False
            self._resume()
        return stream, data


@implementer(IPushProducer)
class Room:
    """The producer of a transport that is written to from a coroutine: `wait` before each write."""

    def __init__(self) -> None:
        self._full = False
        self._waiting: list[Deferred[None]] = []

    async def wait(self) -> None:
        """Until there is room to write, or nobody takes it any more."""
        while self._full:
            room: Deferred[None] = Deferred(self._waiting.remove)
            self._waiting.append(room)
            await room

    def pauseProducing(self) -> None:
        self._full = True

    def resumeProducing(self) -> None:
        self._full = False
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.callback(None)

    def stopProducing(self) -> None:
        self.resumeProducing()
