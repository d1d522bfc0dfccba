# SPDX-License-Identifier: Apache-2.0
"""The node calls an agent by QEMU's socket, whatever is at its other end."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError
from twisted.internet.endpoints import UNIXServerEndpoint
from twisted.internet.interfaces import IListeningPort, IStreamClientEndpoint
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.task import deferLater
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase
from zope.interface.verify import verifyObject

from infranetes.providers.qemu.program.agent_port import AgentPortEndpoint
from infranetes.providers.qemu.program.sockets import AGENT
from infranetes_common import serial_session
from infranetes_common.concurrency import start
from infranetes_common.errors import DeadlineExceeded, Unavailable
from infranetes_common.reactors import installed
from infranetes_common.serial_link import FILLER, MAX_PAYLOAD, RESET, Data, Decoder, Opened, opening, records
from infranetes_common.serial_session import SerialAddress, SessionTransport
from infranetes_common.wire import vmserver
from infranetes_common.wire.vmserver_rpcs import AgentStub
from tests.support.waiting import until
from txgrpc import Call, Channel, GrpcError, Server, Service
from txgrpc.channel import Backoff

reactor = installed()

LEFT = b"".join(records(b"\x01before-", b"x" * 5000))[100:] + RESET  # of an earlier session, half of it lost


class Guest(Protocol):
    """QEMU's socket with an agent behind it, which serves each session.

    :ivar answers: whether it answers an open; otherwise it reads and says nothing.
    :ivar hears: events that the agent has had. :ivar reads: bytes.
    """

    answers = True

    def __init__(self, server: Server) -> None:
        self._server = server
        self._decoder = Decoder()
        self.hears: list[object] = []
        self.reads = 0
        self.session: SessionTransport | None = None
        self.lost = False

    @property
    def port(self) -> Any:
        return self.transport

    def connectionMade(self) -> None:
        self.port.write(LEFT)

    def dataReceived(self, data: bytes) -> None:
        self.reads += len(data)
        for event in self._decoder.events(data):
            self.hears.append(event)
            if isinstance(event, Data):
                assert self.session is not None
                self.session.received(event.payload)
            elif isinstance(event, Opened) and self.answers and self.session is None:
                self.port.write(opening(event.session))
                served = self._server.factory.buildProtocol(None)  # type: ignore[arg-type]
                self.session = SessionTransport(
                    self.port, event.session, SerialAddress("test"), lambda abort: None
                )
                assert served is not None
                self.session.serve(served)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.lost = True
        if self.session is not None:
            self.session.lost(reason)


class Agent:
    def __init__(self) -> None:
        self.asked = 0

    async def Info(self, request: vmserver.InfoRequest, call: Call) -> vmserver.InfoResponse:
        self.asked += 1
        return vmserver.InfoResponse(version=str(call.peer.name))  # type: ignore[attr-defined]


class AgentPortTests(TestCase):
    async def setUp(self) -> None:
        self.agent = Agent()
        self.guests: list[Guest] = []
        self.answers = True
        directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, directory)
        self.path = directory / AGENT
        self.server = Server(reactor, [Service(vmserver.Agent, self.agent)])
        port: IListeningPort = await UNIXServerEndpoint(reactor, str(self.path)).listen(
            Factory.forProtocol(self.guest)
        )
        self.addCleanup(port.stopListening)
        self.endpoint = AgentPortEndpoint(reactor, self.path)
        self.channel = Channel(reactor, self.endpoint, backoff=Backoff(first=0.01, most=0.05))
        self.addCleanup(self.channel.close)
        self.patch(serial_session, "FIRST_PAUSE", 0.05)

    def guest(self) -> Guest:
        made = Guest(self.server)
        made.answers = self.answers
        self.guests.append(made)
        return made

    async def info(self, *, wait: bool = True) -> str:
        answer = await AgentStub(self.channel).Info(vmserver.InfoRequest(), timeout=20.0, wait_for_ready=wait)
        return str(answer.version)

    async def test_calls_go_by_it_past_what_an_earlier_session_has_left(self) -> None:
        verifyObject(IStreamClientEndpoint, self.endpoint)
        for _ in range(3):
            self.assertEqual(await self.info(), "test")
        self.assertEqual((len(self.guests), self.agent.asked), (1, 3))

    async def test_the_end_of_the_channel_is_that_of_the_session(self) -> None:
        await self.info()
        await self.channel.close()
        (guest,) = self.guests
        await until(lambda: guest.lost, "the connection's end")
        self.assertEqual(type(guest.hears[-1]).__name__, "Reset")

    async def test_an_agent_that_was_killed_is_called_again(self) -> None:
        await self.info()
        half = b"".join(records(b"\x01another", bytes(MAX_PAYLOAD)))[:300]
        self.guests[0].port.write(half + FILLER + RESET)
        await until(lambda: self.guests[0].lost, "the connection's end")
        self.assertEqual(await self.info(), "test")
        self.assertEqual(len(self.guests), 2)

    async def test_an_agent_that_starts_late_hears_that_it_is_asked_again(self) -> None:
        self.answers = False
        asked = start(self.info())
        await until(lambda: self.guests and FILLER and self.guests[0].reads > len(FILLER), "another open")
        (guest,) = self.guests
        guest.answers = True
        self.assertEqual(await asked, "test")

    async def test_one_that_never_answers_is_told_in_time(self) -> None:
        self.patch(serial_session, "OPEN_SECONDS", 0.2)
        self.answers = False
        error = await self.assertFailure(start(self.info(wait=False)), GrpcError)
        self.assertIn("does not answer within 0.2 s", str(error))
        await until(lambda: self.guests[0].lost, "the connection's end")

    async def test_one_that_only_floods_takes_no_memory_and_is_told(self) -> None:
        self.patch(serial_session, "MOST_UNASKED", 1 << 20)
        self.answers = False
        asked = start(self.info(wait=False))
        await until(lambda: self.guests, "the connection")
        (guest,) = self.guests
        while not guest.lost:
            guest.port.write(bytes(100_000) + opening(b"\x01nobody-"))
            await deferLater(reactor, 0.0, lambda: None)
        error = await self.assertFailure(asked, GrpcError)
        self.assertIn("nobody has asked for", str(error))

    async def test_a_paused_call_stops_the_reading(self) -> None:
        """What a guest sends faster than the node takes it waits in the guest."""
        await self.info()
        (connection,) = self.channel._live
        (guest,) = self.guests
        connection.transport.pauseProducing()
        assert guest.session is not None
        sent = 0
        while guest.port.producer is None or not guest.port.producerPaused:
            guest.session.write(bytes(100_000))
            sent += 100_000
            await deferLater(reactor, 0.0, lambda: None)
            self.assertLess(sent, 4 << 20)

    async def test_a_qemu_that_is_gone_can_not_be_reached(self) -> None:
        endpoint = AgentPortEndpoint(reactor, self.path.with_name("gone"))
        await self.assertFailure(endpoint.connect(Factory.forProtocol(Protocol)), Unavailable)

    async def test_a_wait_can_be_cancelled(self) -> None:
        self.answers = False
        connecting = self.endpoint.connect(Factory.forProtocol(Protocol))
        await until(lambda: self.guests, "the connection")
        connecting.cancel()
        await self.assertFailure(connecting, CancelledError)
        await until(lambda: self.guests[0].lost, "the connection's end")
        late = self.endpoint.connect(Factory.forProtocol(Protocol))
        self.patch(serial_session, "OPEN_SECONDS", 0.1)
        late.cancel()
        await self.assertFailure(late, CancelledError)

    async def test_its_deadline_is_told_as_one(self) -> None:
        self.patch(serial_session, "OPEN_SECONDS", 0.1)
        self.answers = False
        await self.assertFailure(self.endpoint.connect(Factory.forProtocol(Protocol)), DeadlineExceeded)
