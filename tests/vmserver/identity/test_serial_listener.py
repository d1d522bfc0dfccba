# SPDX-License-Identifier: Apache-2.0
"""The agent is called by its own port, one session after the other."""

from __future__ import annotations

from typing import Any

from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase

from infranetes_common.reactors import installed
from infranetes_common.serial_link import (
    FILLER,
    MAX_PAYLOAD,
    RESET,
    Broken,
    Decoder,
    Opened,
    Reset,
    new_session,
    opening,
    records,
)
from tests.support.serial_port import SerialPort
from tests.support.waiting import until
from vmserver.identity import serial_device
from vmserver.identity.serial_listener import SerialListener

reactor = installed()


class Session(Protocol):
    """Says hello, and what it hears back again."""

    def __init__(self) -> None:
        self.received = b""
        self.lost: list[Failure] = []

    @property
    def port(self) -> Any:
        return self.transport

    def connectionMade(self) -> None:
        self.port.write(b"hello ")

    def dataReceived(self, data: bytes) -> None:
        self.received += data
        self.port.write(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.lost.append(reason)


class Sessions(Factory):
    noisy = False

    def __init__(self) -> None:
        self.made: list[Session] = []
        self.refuses = False

    def buildProtocol(self, addr: IAddress | None) -> Session | None:
        if self.refuses:
            return None
        self.made.append(Session())
        return self.made[-1]


class SerialListenerTests(TestCase):
    def setUp(self) -> None:
        self.patch(serial_device, "SLOW_SECONDS", 0.05)
        self.port = SerialPort()
        self.addCleanup(self.port.leave)
        self.sessions = Sessions()
        self.listener = self.started()

    def started(self) -> SerialListener:
        """Return an agent's listener at the port, as after its start."""
        listener = SerialListener(reactor, self.port.open, self.sessions)
        listener.start()
        self.addCleanup(listener.stop)
        return listener

    async def opened(self, filler: bytes = b"") -> tuple[bytes, Session]:
        """Open a session, and return it once it is answered."""
        session, count = new_session(), len(self.sessions.made)
        await self.port.send(filler + opening(session))
        await self.hears(Opened(session))
        self.assertEqual(len(self.sessions.made), count + 1)
        return session, self.sessions.made[-1]

    async def hears(self, event: object) -> None:
        await until(lambda: self.port.read() and event in self.port.events, str(event))

    async def says(self, session: bytes, words: bytes, answer: bytes) -> None:
        await self.port.send(b"".join(records(session, words)))
        await until(lambda: self.port.payload() == answer, f"the answer {answer!r}")

    async def test_a_session_is_a_connection(self) -> None:
        self.port.come()
        session, served = await self.opened()
        await self.says(session, b"you", b"hello you")
        await self.port.send(RESET)
        await until(lambda: served.lost, "the end")
        self.assertEqual(served.received, b"you")

    async def test_the_node_asks_twice_and_has_one_session(self) -> None:
        self.port.come()
        session, served = await self.opened()
        await self.port.send(FILLER + opening(session))
        await self.says(session, b"you", b"hello you")
        self.assertEqual((self.sessions.made, served.lost), ([served], []))

    async def test_another_session_ends_the_former_whose_words_are_not_its_own(self) -> None:
        """The daemon is replaced, and QEMU is so fast that the agent does not notice it."""
        self.port.come()
        _, former = await self.opened()
        session, served = await self.opened()
        self.assertEqual((len(former.lost), served.lost), (1, []))
        former.port.write(b"late")
        former.port.abortConnection()
        await self.says(session, b"you", b"hello you")

    async def test_one_that_is_aborted_while_it_ends_leaves_the_next_one_alone(self) -> None:
        self.port.come()
        _, former = await self.opened()
        session = new_session()
        former.port.loseConnection()
        self.listener._received(opening(session))
        former.port.abortConnection()
        await until(lambda: former.lost, "its end")
        self.assertEqual(self.sessions.made[-1].lost, [])
        await self.hears(Opened(session))
        await self.says(session, b"you", b"hello you")

    async def test_a_daemon_is_killed_in_the_midst_of_a_record(self) -> None:
        self.port.come()
        session, former = await self.opened()
        record = b"".join(records(session, bytes(MAX_PAYLOAD)))
        await self.port.send(record[: len(record) // 2])
        session, served = await self.opened(opening(new_session()) + FILLER)
        self.assertEqual((len(former.lost), former.received), (1, b""))
        await self.says(session, b"you", b"hello you")
        self.assertEqual(served.received, b"you")

    async def test_a_host_that_leaves_ends_the_session(self) -> None:
        self.port.come()
        session, former = await self.opened()
        await self.port.send(b"".join(records(session, b"half"))[:-3])
        self.port.leave()
        await until(lambda: former.lost, "the end")
        self.port.come()
        session, _ = await self.opened()
        await self.says(session, b"you", b"hello you")

    async def test_an_agent_that_was_killed_is_followed_by_one_that_says_so(self) -> None:
        """The node is in the midst of a record that will never end."""
        self.listener.stop()
        self.port = SerialPort()
        self.addCleanup(self.port.leave)
        self.port.open()
        self.port.come()
        node, former = Decoder(), new_session()
        half = opening(former) + b"".join(records(former, bytes(1000)))[:500]
        self.assertEqual(node.events(half), [Opened(former)])
        self.started()
        await self.port.send(b"".join(records(former, opening(new_session()))))
        heard: list[object] = []

        def hears() -> bool:
            heard.extend(node.events(self.port.read()))
            return bool(heard)

        await until(hears, "its reset")
        self.assertEqual(heard, [Broken()])
        session, _ = await self.opened()
        await self.says(session, b"you", b"hello you")
        self.assertEqual(len(self.sessions.made), 1)

    async def test_what_is_no_record_ends_the_session_and_the_node_hears_it(self) -> None:
        self.port.come()
        _, served = await self.opened()
        await self.port.send(b"what is this?")
        await self.hears(Reset())
        self.assertEqual(len(served.lost), 1)

    async def test_the_protocols_end_is_told_after_its_last_words(self) -> None:
        self.port.come()
        for end in ("loseConnection", "abortConnection"):
            _, served = await self.opened()
            getattr(served.port, end)()
            self.assertEqual(served.lost, [], "not while it may be in the midst of something")
            await self.hears(Reset())
            await until(lambda: served.lost, "its own end")  # noqa: B023
            self.assertTrue(self.port.payload().endswith(b"hello "))

    async def test_one_that_accepts_no_more_says_so_and_the_last_session_goes_on(self) -> None:
        self.port.come()
        session, _ = await self.opened()
        self.listener.stop_accepting()
        await self.says(session, b"you", b"hello you")
        await self.port.send(opening(new_session()))
        await self.hears(Reset())
        self.assertEqual(len(self.sessions.made), 1)

    async def test_a_server_that_takes_no_connection_refuses_the_session(self) -> None:
        self.port.come()
        self.sessions.refuses = True
        session = new_session()
        await self.port.send(opening(session))
        await self.hears(Reset())
        self.assertEqual(self.port.events, [Opened(session), Reset()])

    async def test_its_end_is_the_sessions(self) -> None:
        self.port.come()
        _, served = await self.opened()
        self.listener.stop()
        await until(lambda: served.lost, "the end")
        self.port.read()
        self.assertEqual(self.port.events[-1], Reset())

    async def test_a_paused_protocol_stops_the_reading_and_the_next_session_starts_it(self) -> None:
        self.port.come()
        session, served = await self.opened()
        served.port.pauseProducing()
        sent = sum(self.port.send_some(b"".join(records(session, bytes(60_000)))) for _ in range(50))
        self.assertLess(sent, 1 << 20)
        self.port.leave()
        served.port.abortConnection()
        await until(lambda: served.lost, "the end")
        self.assertEqual(served.received, b"")
        self.port.come()
        session, _ = await self.opened(FILLER)
        await self.says(session, b"you", b"hello you")
