# SPDX-License-Identifier: Apache-2.0
"""Docker's sessions: multiplexed output, terminals, and an engine that answers something else."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import UNIXServerEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes_common.errors import InfranetesError, Unavailable
from infranetes_common.reactors import installed
from tests.contract.container_sessions import Heard
from tests.harness.needs import needs_docker
from tests.vmserver.containers.test_docker import DockerCase
from vmserver.containers.docker.engine import EngineError
from vmserver.containers.docker.hijack import MAX_HEAD_BYTES, Demultiplexer, HijackedConnection, hijack
from vmserver.containers.interface import Streams

reactor = installed()
PIECES = st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.binary(max_size=40)), max_size=8)


def joined(pieces: list[tuple[str, bytes]], stream: str) -> bytes:
    return b"".join(data for which, data in pieces if which == stream)


class DemultiplexerTests(SynchronousTestCase):
    """Docker's multiplexed stream."""

    @given(PIECES, st.integers(1, 30))
    def test_split_anywhere_it_is_the_same(self, pieces: list[tuple[str, bytes]], size: int) -> None:
        wire = b"".join(
            bytes([2 if stream == "stderr" else 1, 0, 0, 0]) + len(data).to_bytes(4, "big") + data
            for stream, data in pieces
        )
        frames = Demultiplexer()
        found = [each for at in range(0, len(wire), size) for each in frames.feed(wire[at : at + size])]
        for stream in ("stdout", "stderr"):
            self.assertEqual(joined(found, stream), joined(pieces, stream))


class Answering(Protocol):
    """An engine that answers every request with the same bytes."""

    transport: Any
    answer = b""
    close = False

    def dataReceived(self, data: bytes) -> None:
        for at in range(0, len(self.answer), 7):
            self.transport.write(self.answer[at : at + 7])
        if self.close:
            self.transport.loseConnection()


class HijackTests(TestCase):
    """The answers of an engine to a request that hijacks the connection."""

    async def hijacked(self, answer: bytes, close: bool = False) -> HijackedConnection:
        kind = type("Answers", (Answering,), {"answer": answer, "close": close})
        directory = tempfile.mkdtemp(prefix="hijack-")  # a socket's path has to be short
        self.addCleanup(shutil.rmtree, directory, True)
        path = Path(directory) / "socket"
        endpoint = UNIXServerEndpoint(reactor, str(path))
        port = await endpoint.listen(Factory.forProtocol(kind))
        self.addCleanup(port.stopListening)
        connection = await hijack(reactor, path, "/x", {}, None, None)
        self.addCleanup(connection.close)
        return connection

    async def refused(self, kind: type[Exception], answer: bytes, close: bool = False) -> Exception:
        try:
            await self.hijacked(answer, close)
        except (EngineError, InfranetesError) as error:
            self.assertIs(type(error), kind, str(error))
            return error
        self.fail("not refused")

    async def test_what_follows_the_answer_is_output(self) -> None:
        connection = await self.hijacked(b"HTTP/1.1 101 UPGRADED\r\nUpgrade: tcp\r\n\r\nhello", close=True)
        said = b"".join([data async for _, data in connection.output])
        self.assertEqual(said, b"hello")

    async def test_much_output_right_behind_the_answer(self) -> None:
        """As of a command that writes at once, while the agent is slow: the answer's end comes with it."""
        connection = HijackedConnection(None)
        connection.makeConnection(StringTransport())  # type: ignore[no-untyped-call]
        for piece in (b"HTTP/1.1 101 UPG", b"RADED\r\n\r\n" + b"x" * MAX_HEAD_BYTES):
            connection.dataReceived(piece)
        self.successResultOf(connection.answered)
        connection.connectionLost()
        self.assertEqual(b"".join([data async for _, data in connection.output]), b"x" * MAX_HEAD_BYTES)

    async def test_a_refusal_has_the_engines_message(self) -> None:
        body = b'{"message":"no such thing"}'
        head = b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n" % len(body)
        error = await self.refused(EngineError, head + body)
        assert isinstance(error, EngineError)
        self.assertEqual((error.status, error.message), (404, "no such thing"))

    async def test_an_answer_that_is_not_http(self) -> None:
        await self.refused(EngineError, b"what?\r\n\r\n")
        await self.refused(EngineError, b"HTTP/1.1 101 " + b"x" * 70000)
        await self.refused(Unavailable, b"HTTP/1.1 1", close=True)

    async def test_no_engine(self) -> None:
        absent = Path("/nonexistent/docker.sock")
        opening: Deferred[object] = Deferred.fromCoroutine(hijack(reactor, absent, "/x", {}, None, None))
        error = await self.assertFailure(opening, Unavailable)
        self.assertIn(str(absent), str(error))


@needs_docker
class TerminalTests(DockerCase, TestCase):
    """A container that was created with a terminal."""

    async def test_an_attached_terminal_has_a_size_and_one_stream(self) -> None:
        script = "while read x; do stty size; echo err $x >&2; done"
        id = await self.run_container("sh", "-c", script, tty=True, stdin=True)
        streams = Streams(tty=True, stdin=True, stdout=True)
        session = await self.provider.attach_session(id, streams)
        self.addCleanup(session.close)
        heard = Heard(session)
        heard.over.addErrback(lambda failure: None)
        await session.resize(70, 20)
        await session.write(b"one\n")
        await self.until(lambda: b"20 70" in heard.out and b"err one" in heard.out, "both on one stream")
        self.assertEqual(heard.err, b"")
        session.close_stdin()
        session.close()
        again = await self.provider.attach_session(id, streams)
        self.addCleanup(again.close)
        other = Heard(again)
        other.over.addErrback(lambda failure: None)
        await again.write(b"two\n")
        await self.until(lambda: b"err two" in other.out, "who attaches later is heard too")
        again.close()
        for each in (heard, other):
            await each.over
