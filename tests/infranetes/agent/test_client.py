"""The client of one VM's agent, over a real socket."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import UNIXClientEndpoint, UNIXServerEndpoint
from twisted.trial import unittest

from infranetes.agent.client import PIECE_BYTES, AgentClient, connector
from infranetes_common import errors, vmserver
from infranetes_common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from txgrpc import Channel, Server, Service


class Agent:
    """As much of an agent as is asked for here."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.full = False
        self.cancelled: Deferred[None] = Deferred()

    async def Info(self, request: Any, call: Any) -> Any:
        return vmserver.InfoResponse(sandbox_id="s1", version="1")

    async def StartContainer(self, request: Any, call: Any) -> Any:
        raise NotFound(f"no container {request.id}")

    async def StopContainer(self, request: Any, call: Any) -> Any:
        await Deferred()

    async def LoadImage(self, requests: Any, call: Any) -> Any:
        async for request in requests:
            self.parts.append(request)
            if self.full:
                raise ResourceExhausted("the machine's disk is full")
        return vmserver.LoadImageResponse(image_id=self.parts[0].header.image_id)

    async def ReadLog(self, request: Any, call: Any) -> Any:
        try:
            for number in range(3):
                yield vmserver.LogRecord(line=b"%d" % number, cursor=f"{request.cursor}{number}")
            await Deferred()
        finally:
            self.cancelled.callback(None)


class ClientTests(unittest.TestCase):
    """What it asks, and what its failures are."""

    timeout = 30

    async def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        path = f"{directory.name}/s"
        self.agent = Agent()
        self.server = Server(reactor, [Service(vmserver.Agent, self.agent)], translate_error=errors.to_grpc)
        port = await UNIXServerEndpoint(reactor, path).listen(self.server.factory)
        channel = Channel(reactor, UNIXClientEndpoint(reactor, path))
        self.client = AgentClient("s1", channel)
        self.port = port
        self.addCleanup(self.server.drain, 0.1)
        self.addCleanup(port.stopListening)
        self.addCleanup(channel.close)

    async def refused(self, kind: type[Exception], work: Any) -> str:
        try:
            await work
        except kind as error:
            return str(error)
        self.fail("not refused")
        return ""

    async def archive(self, size: int, closed: list[bool]) -> AsyncIterator[bytes]:
        try:
            for _ in range(4):
                yield b"x" * (size // 4)
        finally:
            closed.append(True)

    async def test_an_answer(self) -> None:
        self.assertEqual((await self.client.info()).sandbox_id, "s1")

    async def test_the_agents_errors_are_ours(self) -> None:
        words = await self.refused(NotFound, self.client.start("c1"))
        self.assertEqual(words, "no container c1")

    async def test_what_it_lacks(self) -> None:
        await self.refused(errors.Unimplemented, self.client.images())

    async def test_a_connection_that_is_lost_in_the_middle(self) -> None:
        await self.client.info()
        stopping = Deferred.fromCoroutine(self.client.stop("c1", 0))
        reactor.callLater(0.05, self._cut)  # type: ignore[attr-defined]
        self.assertIn("sandbox s1", await self.refused(Unavailable, stopping))

    def _cut(self) -> None:
        for connection in list(self.server.connections):
            connection.transport.abortConnection()

    async def test_nobody_there(self) -> None:
        await self.port.stopListening()
        await self.refused(Unavailable, self.client.info(within=5.0))

    async def test_a_call_has_its_time(self) -> None:
        await self.refused(errors.DeadlineExceeded, self.client.stop("c1", 0, within=0.1))

    async def test_an_image_goes_in_pieces_after_its_header(self) -> None:
        closed: list[bool] = []
        await self.client.load_image("sha256:1", self.archive(5 * PIECE_BYTES, closed))
        header, *pieces = self.agent.parts
        self.assertEqual(header.header.image_id, "sha256:1")
        self.assertEqual(b"".join(each.data for each in pieces), b"x" * (5 * PIECE_BYTES))
        self.assertLessEqual(max(len(each.data) for each in pieces), PIECE_BYTES)
        self.assertEqual(closed, [True])

    async def test_an_image_that_does_not_fit_closes_its_archive(self) -> None:
        closed: list[bool] = []
        self.agent.full = True
        words = await self.refused(
            ResourceExhausted, self.client.load_image("sha256:1", self.archive(8_000_000, closed))
        )
        self.assertIn("full", words)
        self.assertEqual(closed, [True])

    async def test_an_archive_that_breaks_is_told_as_it_is(self) -> None:
        async def broken() -> AsyncIterator[bytes]:
            yield b"x"
            raise FailedPrecondition("a blob is missing in the store")

        await self.refused(FailedPrecondition, self.client.load_image("sha256:1", broken()))

    async def test_a_log_that_nobody_reads_any_more_is_ended_at_the_agent(self) -> None:
        records: Any = self.client.read_log("c1", "at", follow=True)
        seen = [(await records.__anext__()).cursor for _ in range(3)]
        self.assertEqual(seen, ["at0", "at1", "at2"])
        await records.aclose()
        await self.agent.cancelled

    def test_a_machine_without_an_address_is_not_called(self) -> None:
        connect = connector(reactor, None)
        self.assertRaises(InvalidArgument, connect, "s1", "", 1)
        self.assertRaises(InvalidArgument, connect, "s1", "10.0.0.1", 0)
