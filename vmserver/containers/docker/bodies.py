# SPDX-License-Identifier: Apache-2.0
"""Bodies of HTTP requests and responses, with flow control in both directions."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.interfaces import IConsumer, IPushProducer
from twisted.internet.protocol import Protocol
from twisted.python.failure import Failure
from twisted.web.client import ResponseDone
from twisted.web.http import PotentialDataLoss
from twisted.web.iweb import UNKNOWN_LENGTH, IBodyProducer, IResponse
from zope.interface import implementer

from infranetes_common.concurrency import Notifier, start
from infranetes_common.errors import Unavailable

MAX_LINE = 1 << 20  # bytes
_HIGH_WATER = 256 * 1024


class ByteStream(Protocol):
    """A response's body, read at the reader's pace."""

    transport: IPushProducer | None  # type: ignore[assignment]  # what deliverBody connects it to

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._paused = False
        self._end: Failure | None = None
        self._changed = Notifier()

    def dataReceived(self, data: bytes) -> None:
        self._chunks.append(data)
        self._size += len(data)
        if self._size > _HIGH_WATER and not self._paused and self.transport is not None:
            self._paused = True
            self.transport.pauseProducing()
        self._changed.notify()

    def connectionLost(self, reason: Failure = ResponseDone) -> None:  # type: ignore[assignment]
        self._end = reason
        self._changed.notify()

    async def read(self) -> bytes:
        """Return some bytes; none at the end. :raise Unavailable: the connection broke."""
        while not self._chunks:
            if self._end is not None:
                if self._end.check(ResponseDone, PotentialDataLoss) is None:
                    raise Unavailable(
                        f"the connection to Docker's engine broke: {self._end.getErrorMessage()}"
                    )
                return b""
            await self._changed.wait()
        data = self._chunks.popleft()
        self._size -= len(data)
        if self._paused and self._size < _HIGH_WATER // 2 and self.transport is not None:
            self._paused = False
            self.transport.resumeProducing()
        return data

    def close(self) -> None:
        """Close the connection, whatever is unread. Idempotent."""
        if self._end is None and self.transport is not None:
            self.transport.stopProducing()

    async def lines(self) -> AsyncIterator[bytes]:
        """Iterate over the body's lines, without empty ones."""
        rest = b""
        while data := await self.read():
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > MAX_LINE:
                raise Unavailable(f"Docker answers with a line of over {MAX_LINE} bytes")
            for line in lines:
                if line.strip():
                    yield line
        if rest.strip():
            yield rest


async def read_body(response: IResponse) -> bytes:
    """Return a response's whole body. Cancelling it closes the connection.

    In place of Twisted's `readBody`, which logs an error when the connection ends after it was cancelled.

    :raise Unavailable: the connection broke."""
    stream = ByteStream()
    response.deliverBody(stream)
    chunks = []
    try:
        while data := await stream.read():
            chunks.append(data)
    finally:
        stream.close()
    return b"".join(chunks)


@implementer(IBodyProducer)
class JsonBody:
    """A request's body that is a JSON value, written at once."""

    def __init__(self, value: object) -> None:
        self._body = json.dumps(value).encode()
        self.length = len(self._body)

    def startProducing(self, consumer: IConsumer) -> Deferred[None]:
        consumer.write(self._body)
        return succeed(None)

    def pauseProducing(self) -> None:
        pass

    def resumeProducing(self) -> None:
        pass

    def stopProducing(self) -> None:
        pass


@implementer(IBodyProducer)
class StreamBody:
    """A request's body that comes from an async iterator, at the engine's pace.

    :ivar failure: the iterator's error, if it raised one.
    """

    length = UNKNOWN_LENGTH

    def __init__(self, source: AsyncIterator[bytes]) -> None:
        self._source = source
        self._paused = False
        self._stopped = False
        self._resumed = Notifier()
        self._task: Deferred[None] | None = None
        self.failure: Failure | None = None

    def startProducing(self, consumer: IConsumer) -> Deferred[None]:
        written: Deferred[None] = Deferred()
        self._task = start(self._write_all(consumer))
        self._task.addBoth(self._tell, written)
        return written

    def _tell(self, result: Failure | None, written: Deferred[None]) -> None:
        # IBodyProducer: the Deferred never fires once the producer is stopped. The HTTP client has lost the
        # connection then, and fails the request with its own error, or has an answer that came before the
        # body's end.
        if not self._stopped:
            written.callback(result)  # errback, if the result is a Failure

    async def _write_all(self, consumer: IConsumer) -> None:
        while True:
            if self._paused:
                await self._resumed.wait()
            try:
                data = await anext(self._source, None)
            except CancelledError:
                raise
            except Exception:
                self.failure = Failure()
                raise
            if data is None:
                return
            consumer.write(data)

    def pauseProducing(self) -> None:
        self._paused = True

    def resumeProducing(self) -> None:
        self._paused = False
        self._resumed.notify()

    def stopProducing(self) -> None:
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
