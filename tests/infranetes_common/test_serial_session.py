# SPDX-License-Identifier: Apache-2.0
"""A session on a port is a connection to its protocol, and ends like one."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import CancelledError
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IPushProducer
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer
from zope.interface.verify import verifyObject

from infranetes_common.errors import DeadlineExceeded, Unavailable
from infranetes_common.serial_link import FILLER, RESET, Data, Decoder, Opened, opening, records
from infranetes_common.serial_session import (
    FIRST_PAUSE,
    MOST_UNASKED,
    OPEN_SECONDS,
    SerialAddress,
    SessionOpener,
    SessionTransport,
)
from infranetes_common.transports import ByteTransport

ONE, OTHER = b"\x01one----", b"\x01other--"
PEER = SerialAddress("the other end")


def carried(data: bytes, session: bytes = ONE) -> bytes:
    return b"".join(records(session, data))


@implementer(ByteTransport)
class Below(StringTransport):
    """The port's transport, of which a test says when it is full, and when it is gone.

    :ivar ended: `lose` or `abort`, each time that one was asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[str] = []

    def loseConnection(self) -> None:
        self.ended.append("lose")

    def abortConnection(self) -> None:
        self.ended.append("abort")

    @property
    def reads(self) -> bool:
        return bool(self.producerState == "producing")


class Recorder(Protocol):
    """Keeps what it is given. :ivar greedy: it pauses after each piece."""

    greedy = False

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.lost: list[Failure] = []
        self.answer: bytes = b""

    def dataReceived(self, data: bytes) -> None:
        self.received.append(data)
        if self.greedy:
            self.pause()

    def pause(self) -> None:
        self.port.pauseProducing()

    @property
    def port(self) -> Any:
        return self.transport

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.lost.append(reason)


@implementer(IPushProducer)
class Producer:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def pauseProducing(self) -> None:
        self.calls.append("pause")

    def resumeProducing(self) -> None:
        self.calls.append("resume")

    def stopProducing(self) -> None:
        self.calls.append("stop")


class SessionTransportTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.below = Below()
        self.closed: list[bool] = []
        self.protocol = Recorder()
        self.transport = SessionTransport(self.below, ONE, PEER, self.closed.append)
        self.transport.serve(self.protocol)

    def test_it_is_a_transport(self) -> None:
        verifyObject(ByteTransport, self.transport)
        self.assertIs(self.transport.getPeer(), PEER)
        self.assertIs(self.transport.getHost(), PEER)

    def test_what_is_written_goes_as_records(self) -> None:
        self.transport.write(b"one")
        self.transport.write(b"")
        self.transport.writeSequence([b"t", b"wo"])
        self.assertEqual(self.below.value(), carried(b"one") + carried(b"two"))

    def test_nothing_is_handed_over_or_read_while_it_is_paused(self) -> None:
        self.protocol.greedy = True
        for each in (b"a", b"b", b"c"):
            self.transport.received(each)
        self.assertEqual(self.protocol.received, [b"a"])
        self.assertFalse(self.below.reads)
        self.transport.resumeProducing()
        self.assertEqual(self.protocol.received, [b"a", b"b"])
        self.assertFalse(self.below.reads)
        self.protocol.greedy = False
        self.transport.resumeProducing()
        self.assertEqual(self.protocol.received, [b"a", b"b", b"c"])
        self.assertTrue(self.below.reads)

    def test_the_end_comes_after_all_that_has_come(self) -> None:
        self.protocol.pause()
        self.transport.received(b"last")
        self.transport.lost(Failure(ConnectionDone()))
        self.assertEqual((self.protocol.received, len(self.protocol.lost)), ([b"last"], 1))
        self.assertTrue(self.below.reads, "the next session has to be heard")
        self.transport.lost(Failure(ConnectionLost()))
        self.transport.received(b"late")
        self.transport.write(b"late")
        self.assertEqual((self.protocol.received, len(self.protocol.lost)), ([b"last"], 1))
        self.assertEqual(self.below.value(), b"")

    def test_its_producer_is_told_by_the_port_until_the_end(self) -> None:
        producer = Producer()
        self.transport.registerProducer(producer, True)
        self.assertEqual((self.below.producer, self.below.streaming), (producer, True))
        self.transport.lost(Failure(ConnectionDone()))
        self.assertIsNone(self.below.producer)
        self.transport.registerProducer(producer, True)
        self.assertIsNone(self.below.producer)
        self.assertEqual(producer.calls, ["stop"])

    def test_a_pull_producer_is_refused(self) -> None:
        self.assertRaises(ValueError, self.transport.registerProducer, Producer(), False)

    def test_it_ends_with_a_word_to_the_other_side(self) -> None:
        self.transport.registerProducer(Producer(), True)
        self.transport.write(b"last")
        self.transport.loseConnection()
        self.transport.loseConnection()
        self.transport.write(b"late")
        self.assertEqual(self.below.value(), carried(b"last") + RESET)
        self.assertEqual((self.closed, self.protocol.lost), ([False], []))
        self.assertIsNone(self.below.producer)

    def test_it_can_be_aborted_while_it_closes_and_not_after_that(self) -> None:
        self.transport.loseConnection()
        self.transport.abortConnection()
        self.assertEqual(self.closed, [False, True])
        self.transport.lost(Failure(ConnectionDone()))
        self.transport.abortConnection()
        self.assertEqual(self.closed, [False, True])


class OpenerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.below = Below()
        self.protocol = Recorder()
        factory = Factory.forProtocol(lambda: self.protocol)
        self.opener = SessionOpener(self.clock, factory, PEER)  # type: ignore[arg-type]
        self.opener.makeConnection(self.below)
        (asked,) = Decoder().events(self.below.value())
        assert isinstance(asked, Opened)
        self.session = asked.session

    def open(self) -> None:
        self.opener.dataReceived(opening(self.session))
        self.assertIs(self.successResultOf(self.opener.opened), self.protocol)
        self.below.clear()

    def test_it_is_open_once_it_is_answered_and_what_came_before_is_dropped(self) -> None:
        stale = opening(OTHER) + carried(b"stale", OTHER) + RESET + carried(b"stale", OTHER)
        self.opener.dataReceived(stale + opening(self.session)[:9])
        self.assertNoResult(self.opener.opened)
        self.opener.dataReceived(opening(self.session)[9:] + carried(b"hello", self.session))
        self.assertIs(self.successResultOf(self.opener.opened), self.protocol)
        self.assertEqual(self.protocol.received, [b"hello"])
        self.protocol.port.write(b"x")
        self.assertEqual(self.below.value(), opening(self.session) + carried(b"x", self.session))
        self.clock.advance(OPEN_SECONDS)
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.assertEqual(self.below.ended, [])

    def test_it_asks_again_with_filler_for_whoever_waits_for_the_rest_of_a_record(self) -> None:
        whole = self.below.value()
        self.clock.advance(FIRST_PAUSE)
        self.clock.pump([FIRST_PAUSE] * 2)
        again = FILLER + opening(self.session)
        self.assertEqual(self.below.value(), whole + 2 * again)
        self.open()
        self.clock.advance(OPEN_SECONDS)
        self.assertEqual(self.below.value(), b"")

    def test_a_second_answer_changes_nothing(self) -> None:
        self.open()
        self.opener.dataReceived(FILLER + opening(self.session) + carried(b"x", self.session))
        self.assertEqual((self.protocol.received, self.protocol.lost), ([b"x"], []))

    def test_without_an_answer_it_gives_up(self) -> None:
        self.clock.pump([0.25] * int(OPEN_SECONDS / 0.25))
        self.failureResultOf(self.opener.opened, DeadlineExceeded)
        self.assertEqual(self.below.ended, ["abort"])
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.assertLess(len(self.below.value()), 10 * len(FILLER), "a guest that never reads costs little")
        self.opener.connectionLost(Failure(ConnectionLost()))

    def test_one_that_only_floods_is_given_up(self) -> None:
        chunk = carried(bytes(1 << 20), OTHER)
        for _ in range(MOST_UNASKED >> 20):
            self.opener.dataReceived(chunk[: 1 << 20])
        self.assertNoResult(self.opener.opened)
        self.opener.dataReceived(b"x")
        self.failureResultOf(self.opener.opened, Unavailable)
        self.assertEqual(self.below.ended, ["abort"])

    def test_a_connection_that_is_lost_before_the_answer_fails(self) -> None:
        self.opener.connectionLost(Failure(ConnectionDone()))
        self.failureResultOf(self.opener.opened, Unavailable)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_it_is_cancelled(self) -> None:
        self.opener.opened.cancel()
        self.failureResultOf(self.opener.opened, CancelledError)
        self.assertEqual((self.below.ended, self.clock.getDelayedCalls()), (["abort"], []))
        self.opener.dataReceived(opening(self.session))
        self.assertIsNone(self.protocol.transport, "it is not opened after that")

    def test_the_other_ends_end_is_the_protocols(self) -> None:
        for over, reason in (
            (RESET, ConnectionDone),
            (b"garbage, as of a program that was killed", ConnectionLost),
        ):
            self.setUp()
            self.open()
            self.opener.dataReceived(carried(b"last", self.session) + over + carried(b"late", self.session))
            self.assertEqual(self.protocol.received, [b"last"])
            (lost,) = self.protocol.lost
            self.assertTrue(lost.check(reason), lost)
            self.assertEqual(self.below.ended, ["abort"])
            self.opener.connectionLost(Failure(ConnectionLost()))
            self.assertEqual(len(self.protocol.lost), 1)

    def test_the_connections_end_is_the_protocols(self) -> None:
        self.open()
        self.opener.connectionLost(Failure(ConnectionLost()))
        self.assertEqual(len(self.protocol.lost), 1)

    def test_the_protocols_end_closes_the_connection(self) -> None:
        self.open()
        self.protocol.port.loseConnection()
        self.assertEqual((self.below.value(), self.below.ended), (RESET, ["lose"]))
        self.protocol.port.abortConnection()
        self.assertEqual(self.below.ended, ["lose", "abort"])
        self.assertEqual(self.protocol.lost, [])
        self.opener.connectionLost(Failure(ConnectionDone()))
        self.assertEqual(len(self.protocol.lost), 1)

    def test_a_paused_protocol_stops_the_reading(self) -> None:
        self.open()
        self.protocol.greedy = True
        self.opener.dataReceived(carried(b"a", self.session) + carried(b"b", self.session))
        self.assertFalse(self.below.reads)
        self.assertEqual(self.protocol.received, [b"a"])

    def test_events_are_data_of_the_session_alone(self) -> None:
        self.open()
        events = Decoder().events(opening(self.session) + carried(b"x", self.session))
        self.assertEqual(events, [Opened(self.session), Data(b"x")])
