"""A connection to Docker's engine that becomes the raw streams of an exec or an attach.

Source: Docker Engine API v1.41, ContainerAttach: the request asks for ``Upgrade: tcp``, the answer is
``101 UPGRADED``, and then both directions are the streams': without a terminal, output is multiplexed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from email.parser import BytesParser
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.endpoints import UNIXClientEndpoint, connectProtocol
from twisted.internet.error import ConnectError
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Protocol
from zope.interface import implementer

from infranetes_common.errors import Unavailable
from vmserver.containers.docker.engine import API, CALL_SECONDS, CONNECT_SECONDS, EngineError
from vmserver.containers.sessions import Output, Room

MAX_HEAD_BYTES = 64 * 1024
_HEADER_BYTES = 8
_STDERR = 2
_SWITCHING = 101


class Frames:
    """Docker's multiplexed stream: frames of type, three zeros, size (4 bytes, big endian), bytes."""

    def __init__(self) -> None:
        self._header = b""
        self._kind = ""
        self._left = 0

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """Bytes in, split anywhere; what they are of which stream out, nothing of it kept back."""
        pieces = []
        at = 0
        while at < len(data):
            if self._left:
                piece = data[at : at + self._left]
                pieces.append((self._kind, piece))
                self._left -= len(piece)
                at += len(piece)
                continue
            wanted = _HEADER_BYTES - len(self._header)
            self._header += data[at : at + wanted]
            at += wanted
            if len(self._header) == _HEADER_BYTES:
                self._kind = "stderr" if self._header[0] == _STDERR else "stdout"
                self._left = int.from_bytes(self._header[4:], "big")
                self._header = b""
        return pieces


@implementer(IHalfCloseableProtocol)
class Hijacked(Protocol):
    """The connection.

    :param frames: how output is multiplexed; None: it is all stdout.
    :ivar output: what comes in. :ivar answered: fires when the streams stand; fails with EngineError.
    """

    transport: Any

    def __init__(self, frames: Frames | None) -> None:
        self._frames = frames
        self._head: bytes | None = b""  # of the answer, while it is read
        self._finished = False
        self._lost = False
        self._room = Room()
        self.output = Output(self._pause, self._resume)
        self.answered: Deferred[None] = Deferred(lambda _: self.transport.abortConnection())

    def connectionMade(self) -> None:
        self.transport.registerProducer(self._room, True)

    def dataReceived(self, data: bytes) -> None:
        if self._head is not None:
            self._head += data
            data = self._answer()
        if self._frames is None:
            self.output.put("stdout", data)
        else:
            for stream, piece in self._frames.feed(data):
                self.output.put(stream, piece)

    def _answer(self) -> bytes:
        """Look whether the answer is whole; what follows it."""
        assert self._head is not None
        head, separator, rest = self._head.partition(b"\r\n\r\n")
        status_line, _, fields = head.partition(b"\r\n")
        words = status_line.split(None, 2)
        if len(self._head) > MAX_HEAD_BYTES or (separator and (len(words) < 2 or not words[1].isdigit())):
            self._refused(500, "its answer is not HTTP")
        elif separator and int(words[1]) == _SWITCHING:
            self._head = None
            self.answered.callback(None)
            return rest
        elif separator:
            length = BytesParser().parsebytes(fields + b"\r\n\r\n")["Content-Length"] or "0"
            if not length.isdigit() or len(rest) >= int(length):
                self._refused(int(words[1]), _message(rest))
        return b""

    def _refused(self, status: int, message: str) -> None:
        self._head = b""
        if not self.answered.called:
            self.answered.errback(EngineError(status, message))
        self.transport.abortConnection()

    def readConnectionLost(self) -> None:
        """Docker has written all: the process is over."""
        self.close()

    def writeConnectionLost(self) -> None:
        self._room.stopProducing()

    def connectionLost(self, reason: Any = None) -> None:
        self._lost = True
        self._room.stopProducing()
        if not self.answered.called:
            self.answered.errback(Unavailable("Docker's engine closed the connection before it answered"))
        self.output.end()

    def _pause(self) -> None:
        if not self._lost:
            self.transport.pauseProducing()

    def _resume(self) -> None:
        if not self._lost:
            self.transport.resumeProducing()

    async def write(self, data: bytes) -> None:
        """Write, and wait until more may follow. After the end: dropped."""
        if not self._finished and not self._lost:
            self.transport.write(data)
            await self._room.wait()

    def finish(self) -> None:
        """Write no more. Twice is once."""
        if not self._finished and not self._lost:
            self._finished = True
            self.transport.unregisterProducer()
            self.transport.loseWriteConnection()

    def close(self) -> None:
        """End both directions. Twice is once."""
        self._finished = True
        if not self._lost:
            self.transport.abortConnection()


async def hijack(
    reactor: Any, socket: Path, path: str, query: Mapping[str, str], body: Any, frames: Frames | None
) -> Hijacked:
    """POST `body` (JSON) to the engine's `path` and take the connection over.

    :raise EngineError: it refuses. :raise Unavailable: it can't be reached, or does not answer.
    """
    endpoint = UNIXClientEndpoint(reactor, str(socket), timeout=CONNECT_SECONDS)
    try:
        connection: Hijacked = await connectProtocol(endpoint, Hijacked(frames))
    except ConnectError as error:
        raise Unavailable(f"Docker's engine can't be reached at {socket}: {error}") from error
    content = b"" if body is None else json.dumps(body).encode()
    target = f"{API}{quote(path)}" + (f"?{urlencode(query)}" if query else "")
    lines = [
        f"POST {target} HTTP/1.1",
        "Host: docker",
        "Connection: Upgrade",
        "Upgrade: tcp",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    ]
    connection.transport.write("\r\n".join([*lines, "", ""]).encode() + content)
    connection.answered.addTimeout(CALL_SECONDS, reactor)
    try:
        await connection.answered
    except TimeoutError:
        raise Unavailable(f"Docker's engine did not answer POST {path} within {CALL_SECONDS:g} s") from None
    return connection


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
