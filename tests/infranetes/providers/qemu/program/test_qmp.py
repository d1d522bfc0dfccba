# SPDX-License-Identifier: Apache-2.0
"""The client's side of QMP."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.error import ConnectionDone
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.qemu.program.qmp import (
    MAX_LINE,
    Answer,
    Greeting,
    QmpConnection,
    QmpCore,
    QmpError,
    QmpEvent,
)
from infranetes.providers.qemu.settings import MIB
from infranetes_common.errors import DeadlineExceeded, Unavailable
from tests.support.peak import peak

GREETING = b'{"QMP": {"version": {}, "capabilities": []}}\r\n'


class QmpCoreTests(SynchronousTestCase):
    """QMP without a transport."""

    @given(st.lists(st.integers(min_value=1, max_value=40), max_size=20))
    def test_messages_come_out_whole_however_they_are_cut(self, cuts: list[int]) -> None:
        wire = GREETING + b'{"return": {"a": 1}, "id": 1}\r\n{"event": "STOP", "timestamp": {}}\r\n'
        wire += b'{"error": {"class": "GenericError", "desc": "no"}, "id": 2}\r\n'
        core = QmpCore()
        found: list[Any] = []
        for cut in cuts:
            found += core.receive(wire[:cut])
            wire = wire[cut:]
        found += core.receive(wire)
        expected = [Greeting(), Answer(1, {"a": 1}), QmpEvent("STOP", {}), Answer(2, error="no")]
        self.assertEqual(found, expected)

    def test_nonsense_is_refused(self) -> None:
        self.assertRaises(ValueError, QmpCore().receive, b"hello\n")
        self.assertRaises(ValueError, QmpCore().receive, b"[1]\n")
        self.assertRaises(ValueError, QmpCore().receive, b"x" * MAX_LINE + b"yy")

    def test_an_answer_of_many_small_values_takes_no_memory(self) -> None:
        answer = b'{"id": 1, "return": [' + b"{}," * (MAX_LINE // 3 - 20) + b"{}]}\n"
        self.assertLess(peak(lambda: self.assertRaises(ValueError, QmpCore().receive, answer)), 8 * MIB)


class QmpTests(SynchronousTestCase):
    """A monitor connection."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.events: list[QmpEvent] = []
        self.lost = 0
        self.qmp = QmpConnection(self.clock, self.events.append, self.on_lost)
        self.transport = StringTransport()
        self.qmp.makeConnection(self.transport)

    def on_lost(self) -> None:
        self.lost += 1

    def sent(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.transport.value().splitlines()]

    def test_a_command_waits_for_the_greeting_and_follows_the_negotiation(self) -> None:
        self.qmp.execute("query-status")
        self.assertEqual(self.sent(), [])
        self.qmp.dataReceived(GREETING)
        self.assertEqual([each["execute"] for each in self.sent()], ["qmp_capabilities", "query-status"])

    def test_answers_find_their_commands(self) -> None:
        self.qmp.dataReceived(GREETING)
        first = self.qmp.execute("one")
        second = self.qmp.execute("two", socket_id=0)
        numbers = [each["id"] for each in self.sent()[1:]]
        self.assertEqual(self.sent()[2]["arguments"], {"socket-id": 0})
        self.qmp.dataReceived(json.dumps({"return": 2, "id": numbers[1]}).encode() + b"\n")
        refusal = {"error": {"class": "X", "desc": "bad one"}, "id": numbers[0]}
        self.qmp.dataReceived(json.dumps(refusal).encode() + b"\n")
        self.assertEqual(self.successResultOf(second), 2)
        self.assertIn("bad one", str(self.failureResultOf(first, QmpError).value))

    def test_a_command_without_answer_fails_in_time(self) -> None:
        waiting = self.qmp.execute("query-status", 3.0)
        self.clock.advance(3.1)
        self.failureResultOf(waiting, DeadlineExceeded)
        self.qmp.dataReceived(GREETING)

    def test_when_qemu_goes_all_that_waits_fails(self) -> None:
        self.qmp.dataReceived(GREETING)
        waiting = self.qmp.execute("cont")
        self.qmp.connectionLost(Failure(ConnectionDone()))
        self.failureResultOf(waiting, Unavailable)
        self.failureResultOf(self.qmp.execute("cont"), Unavailable)
        self.assertEqual(self.lost, 1)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_events_are_told_and_nonsense_ends_the_connection(self) -> None:
        self.qmp.dataReceived(GREETING + b'{"event": "SHUTDOWN", "data": {"reason": "guest-panic"}}\n')
        self.assertEqual(self.events, [QmpEvent("SHUTDOWN", {"reason": "guest-panic"})])
        self.qmp.dataReceived(b"\xff\n")
        self.assertTrue(self.transport.disconnected)
