# SPDX-License-Identifier: Apache-2.0
"""The bytes of sessions: small pieces are joined, and pipes transfer large amounts at once."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.process import Process
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes_common.concurrency import start
from infranetes_common.reactors import installed
from vmserver.containers import pipes
from vmserver.containers.sessions import HIGH_WATER, JOINED_BYTES, Output

PUTS = st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.integers(1, JOINED_BYTES)), max_size=12)


class OutputTests(SynchronousTestCase):
    """The output of a session's process."""

    def read(self, output: Output) -> list[tuple[str, bytes]]:
        async def all_of_it() -> list[tuple[str, bytes]]:
            return [one async for one in output]

        return self.successResultOf(start(all_of_it()))

    @given(PUTS)
    def test_pieces_of_one_stream_come_joined_and_in_order(self, puts: list[tuple[str, int]]) -> None:
        moves: list[str] = []
        output = Output(lambda: moves.append("pause"), lambda: moves.append("resume"))
        for number, (stream, size) in enumerate(puts):
            output.put(stream, bytes([number]) * size)
        output.end()
        unread = sum(size for _, size in puts)
        self.assertEqual(moves, ["pause"] if unread > HIGH_WATER else [])
        found = self.read(output)
        for stream in ("stdout", "stderr"):
            put = b"".join(bytes([number]) * size for number, (to, size) in enumerate(puts) if to == stream)
            self.assertEqual(b"".join(data for to, data in found if to == stream), put)
        self.assertTrue(all(len(data) <= JOINED_BYTES for _, data in found))
        for (one, data), (other, more) in pairwise(found):
            self.assertTrue(one != other or len(data) + len(more) > JOINED_BYTES)
        self.assertEqual(moves, ["pause", "resume"] if unread > HIGH_WATER else [])

    def test_a_failure_is_told_before_what_is_unread(self) -> None:
        output = Output(lambda: None, lambda: None)
        output.put("stdout", b"unread")
        output.fail(ValueError("broken"))
        self.failureResultOf(start(anext(output)), ValueError)


class _Child(ProcessProtocol):
    transport: Process

    def __init__(self) -> None:
        self.pieces: list[int] = []
        self.ended: Deferred[None] = Deferred()

    def connectionMade(self) -> None:
        pipes.widen(self.transport)
        self.transport.pauseProducing()

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        self.pieces.append(len(data))

    def processExited(self, reason: Failure) -> None:
        self.transport.resumeProducing()

    def processEnded(self, reason: Failure) -> None:
        self.ended.callback(None)


class PipeTests(TestCase):
    """The pipes of a real command."""

    async def test_a_command_is_far_ahead_and_all_it_wrote_is_read_in_large_pieces(self) -> None:
        child = _Child()
        size = pipes.PIPE_BYTES
        command = ["dd", "if=/dev/zero", "bs=4096", f"count={size // 4096}", "status=none"]
        reactor = installed()
        reactor.spawnProcess(child, command[0], command, env={"PATH": "/usr/bin:/bin"})
        await child.ended  # it ends although its output has not been read
        self.assertEqual(child.pieces, [pipes.READ_BYTES] * (size // pipes.READ_BYTES))
