# SPDX-License-Identifier: Apache-2.0
"""The client of one VM's agent, over a real socket."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from typing import Any, cast

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import UNIXClientEndpoint, UNIXServerEndpoint
from twisted.trial import unittest
from zope.interface.verify import verifyObject

from infranetes.identity.authority import Authority
from infranetes.machines.agent import limits
from infranetes.machines.agent.calls import CHUNK_BYTES
from infranetes.machines.agent.client import AgentClient, connector
from infranetes.machines.agent.screen import AgentScreen
from infranetes.machines.interface import IAgent
from infranetes_common import errors
from infranetes_common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.filesync.manifest import FILE, Bounds, Entry
from infranetes_common.reactors import installed
from infranetes_common.wire import vmserver
from tests.support.hostile.agent import HostileAgent
from tests.support.hostile.attacks import ATTACKS
from txgrpc import Channel, Server, Service


class Agent:
    """The part of an agent that these tests call."""

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
    """The client's calls, and how they fail."""

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

    def test_it_is_an_agent(self) -> None:
        verifyObject(IAgent, self.client)

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

    async def test_what_it_does_not_offer_needs_another_guest_image(self) -> None:
        words = await self.refused(errors.NotOffered, self.client.images())
        self.assertIn("the agent of sandbox s1 does not offer this", words)
        self.assertIn("guest image is of an earlier release: rebuild it", words)

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
        await self.client.load_image("sha256:1", self.archive(5 * CHUNK_BYTES, closed))
        header, *pieces = self.agent.parts
        self.assertEqual(header.header.image_id, "sha256:1")
        self.assertEqual(b"".join(each.data for each in pieces), b"x" * (5 * CHUNK_BYTES))
        self.assertLessEqual(max(len(each.data) for each in pieces), CHUNK_BYTES)
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
        connect = connector(installed(), cast(Authority, None))
        self.assertRaises(InvalidArgument, connect, "s1", "", 1)
        self.assertRaises(InvalidArgument, connect, "s1", "10.0.0.1", 0)


class HostileCase(unittest.TestCase):
    """A hostile agent, over a real socket; a callback that blocks the reactor too long fails these, too."""

    async def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        path = f"{directory.name}/s"
        self.agent = HostileAgent("s1", ("c1",))
        server = Server(reactor, [Service(vmserver.Agent, self.agent)], translate_error=errors.to_grpc)
        port = await UNIXServerEndpoint(reactor, path).listen(server.factory)
        channel = Channel(
            reactor, UNIXClientEndpoint(reactor, path), limits=limits.CHANNEL, screen=AgentScreen()
        )
        self.client = AgentClient("s1", channel)
        self.addCleanup(server.drain, 0.1)
        self.addCleanup(port.stopListening)
        self.addCleanup(channel.close)

    def attack(self, method: str, name: str) -> None:
        self.agent.attacks = {**self.agent.attacks, method: ATTACKS[method, name]}

    async def refused(self, kind: type[Exception], work: Any) -> str:
        with self.assertRaises(kind) as caught:
            await work
        return str(caught.exception)


class HostileTests(HostileCase):
    """Hostile answers to all kinds of calls; those about layers have a module of their own."""

    async def test_figures(self) -> None:
        for attack in ("cards", "containers", "repeated", "huge", "names"):
            self.attack("Stats", attack)
            try:
                answer = await self.client.stats()
            except ResourceExhausted:
                continue
            self.assertEqual(attack, "names")
            self.assertLess(answer.ByteSize(), 20_000)
        for attack in ("text", "broken"):
            self.attack("Stats", attack)
            await self.refused(errors.InfranetesError, self.client.stats())

    async def test_more_output_than_was_asked_for(self) -> None:
        self.attack("ExecSync", "output")
        answer = await self.client.exec_sync("c1", ["x"], 0, 20.0, 1000)
        self.assertEqual(len(answer.stdout), 1000)

    async def test_a_volume_that_is_listed_without_end(self) -> None:
        bounds = Bounds(16384, 1 << 28)
        for attack, words in (
            ("repeated", "twice"),
            ("empty", "does not end"),
            ("long", "paths"),
            ("huge", "limit"),
        ):
            self.attack("ListVolume", attack)
            said = await self.refused(errors.InfranetesError, self.client.list_volume("v1", bounds))
            self.assertIn(words, said)

    async def test_a_file_that_comes_in_other_pieces_than_were_asked_for(self) -> None:
        for attack in ("pieces", "empty", "huge"):
            self.attack("ReadVolume", attack)
            kind = InvalidArgument if attack == "empty" else ResourceExhausted
            await self.refused(kind, self._read())

    async def _read(self) -> None:
        entry = Entry(b"f", FILE, 0o644, 0, 0, 1 << 27, 1)
        async for change in self.client.read_volume("v1", [entry]):
            if isinstance(change, bytes):
                self.assertLessEqual(len(change), limits.CHUNK_BYTES)

    async def test_a_log_of_newlines(self) -> None:
        self.attack("ReadLog", "lines")
        records: Any = self.client.read_log("c1", "", follow=True)
        seen = [await records.__anext__() for _ in range(50)]
        self.assertEqual({(len(one.line), one.time_nanos) for one in seen}, {(16384, 0)})
        await records.aclose()
        for attack in ("newlines", "cursors"):
            self.attack("ReadLog", attack)
            records = self.client.read_log("c1", "", follow=True)
            await self.refused(errors.InfranetesError, records.__anext__())

    async def test_states_of_other_containers(self) -> None:
        async def other(agent: Any, request: Any) -> Any:
            return vmserver.StopContainerResponse(state=agent.state("c2"))

        self.agent.attacks = {"StopContainer": other}
        await self.refused(InvalidArgument, self.client.stop("c1", 0))

    async def test_images_and_layers(self) -> None:
        self.attack("ListImages", "many")
        await self.refused(ResourceExhausted, self.client.images())

        async def layers(agent: Any, request: Any) -> Any:
            return vmserver.MissingLayersResponse(present=2**32 - 1)

        self.agent.attacks = {"MissingLayers": layers}
        self.assertEqual(await self.client.missing_layers(["a", "b"]), 2)
