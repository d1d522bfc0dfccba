# SPDX-License-Identifier: Apache-2.0
"""HTTP connections to Docker's engine that turn into the raw streams of an exec or attach.

The request has ``Upgrade: tcp``, the answer is ``101 UPGRADED``, and then the connection carries stdin in one
direction and output in the other, multiplexed unless there is a terminal. Source: Docker Engine API v1.41,
ContainerAttach.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from email.parser import BytesParser
from pathlib import Path
from urllib.parse import quote, urlencode

from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.endpoints import UNIXClientEndpoint, connectProtocol
from twisted.internet.error import ConnectError
from twisted.internet.protocol import connectionDone
from twisted.python.failure import Failure

from infranetes_common.errors import Unavailable
from infranetes_common.reactors import IReactor
from vmserver.containers.docker.api import Request
from vmserver.containers.docker.engine import (
    API,
    CALL_SECONDS,
    CONNECT_SECONDS,
    EngineError,
    error_message,
)
from vmserver.containers.session_connection import SessionConnection

MAX_HEAD_BYTES = 64 * 1024
_HEADER_BYTES = 8
_STDERR = 2
_SWITCHING = 101


class Demultiplexer:
    """Parses Docker's multiplexed stream: frames of type, three zeros, size (4 bytes, big endian), bytes."""

    def __init__(self) -> None:
        self._header = b""
        self._kind = ""
        self._left = 0

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """Add bytes, split anywhere; return the streams' names and bytes, without buffering any."""
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


class HijackedConnection(SessionConnection):
    """A connection that becomes streams.

    :param demultiplexer: for the output; None if all of it is stdout.
    :ivar answered: fires when the engine has agreed; fails with EngineError.
    """

    def __init__(self, demultiplexer: Demultiplexer | None) -> None:
        super().__init__()
        self._demultiplexer = demultiplexer
        self._head: bytes | None = b""  # the answer's header so far; None once it is complete
        self.answered: Deferred[None] = Deferred(lambda _: self.transport.abortConnection())

    def dataReceived(self, data: bytes) -> None:
        if self._head is not None:
            self._head += data
            data = self._answer()
        if self._demultiplexer is None:
            self.output.put("stdout", data)
        else:
            for stream, piece in self._demultiplexer.feed(data):
                self.output.put(stream, piece)

    def _answer(self) -> bytes:
        """Parse the answer once its header is complete; return what follows it."""
        assert self._head is not None
        head, separator, rest = self._head.partition(b"\r\n\r\n")
        status_line, _, fields = head.partition(b"\r\n")
        words = status_line.split(None, 2)
        if len(head) > MAX_HEAD_BYTES or (separator and (len(words) < 2 or not words[1].isdigit())):
            self._refused(500, "the answer is not HTTP")
        elif separator and int(words[1]) == _SWITCHING:
            self._head = None
            self.answered.callback(None)
            return rest
        elif separator:
            length = BytesParser().parsebytes(fields + b"\r\n\r\n")["Content-Length"] or "0"
            if not length.isdigit() or len(rest) >= min(int(length), MAX_HEAD_BYTES):
                self._refused(int(words[1]), error_message(rest))
        return b""

    def _refused(self, status: int, message: str) -> None:
        self._head = b""
        if not self.answered.called:
            self.answered.errback(EngineError(status, message))
        self.transport.abortConnection()

    def readConnectionLost(self) -> None:
        """The process has ended, and Docker has sent all of its output."""
        self.close()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        super().connectionLost(reason)
        if not self.answered.called:
            self.answered.errback(Unavailable("Docker's engine closed the connection before it answered"))

    def close(self) -> None:
        """Close both directions. Idempotent."""
        self._finished = True
        if not self._lost:
            self.transport.abortConnection()


async def hijack(
    reactor: IReactor,
    socket: Path,
    path: str,
    query: Mapping[str, str],
    body: Request | None,
    demultiplexer: Demultiplexer | None,
) -> HijackedConnection:
    """POST `body` to the engine's `path` and take over the connection.

    :raise EngineError: it refuses. :raise Unavailable: it can't be reached, or does not answer.
    """
    endpoint = UNIXClientEndpoint(reactor, str(socket), timeout=CONNECT_SECONDS)
    try:
        connection: HijackedConnection = await connectProtocol(endpoint, HijackedConnection(demultiplexer))
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
