# SPDX-License-Identifier: Apache-2.0
"""Requests to a guest's agent: in turn, answered or given up, whatever the guest does."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.machines.agentless.guest_agent.connection import (
    MOST_WAITING,
    AgentConnection,
    Unanswered,
)
from infranetes.machines.agentless.guest_agent.protocol import Answer, Nonsense, Request
from infranetes_common.concurrency import Coro, start
from infranetes_common.errors import ResourceExhausted, Unavailable
from tests.infranetes.machines.agentless.guest_agent.stand_in import SILENT, StandInAgent


def value(answer: Answer) -> object:
    return answer.value


class ConnectionCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.agent = StandInAgent()
        self.agent.handlers["echo"] = lambda arguments: arguments.get("text", "")
        self.agent.handlers["silent"] = lambda arguments: SILENT
        self.connection = AgentConnection(self.clock, self.agent, "the QEMU guest agent of sandbox 1")
        self.addCleanup(self._close)

    def _close(self) -> None:
        self.connection.close()
        self.clock.pump([1.0] * 200)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def ask(self, command: str = "echo", **more: Any) -> Deferred[object]:
        arguments = more.pop("arguments", {})
        return start(self.connection.ask(Request(command, arguments, **more), value))

    def echo(self, text: str) -> Deferred[object]:
        return self.ask(arguments={"text": text})

    def reach(self, seconds: float) -> Deferred[None]:
        work: Coro[None] = self.connection.reach(seconds)
        return start(work)

    def wait(self, seconds: float) -> None:
        self.clock.pump([0.1] * round(seconds * 10))


class TurnTests(ConnectionCase):
    """One request at a time, in the order in which they come."""

    def test_one_connection_and_one_synchronisation_are_enough(self) -> None:
        for text in "abc":
            self.assertEqual(self.successResultOf(self.echo(text)), text)
        self.assertEqual((self.agent.connections, self.agent.synchronised), (1, 1))

    def test_nothing_is_sent_before_the_answer_to_what_was_sent_before(self) -> None:
        waiting = [self.ask("silent"), self.echo("b"), self.echo("c")]
        self.assertEqual(self.agent.commands, ["silent"])
        self.agent.answer("a")
        self.wait(1)
        self.assertEqual([self.successResultOf(each) for each in waiting], ["a", "b", "c"])

    def test_a_request_that_is_cancelled_before_its_turn_is_never_sent(self) -> None:
        first, second, third = self.ask("silent"), self.echo("b"), self.echo("c")
        second.cancel()
        self.failureResultOf(second, CancelledError)
        self.agent.answer("a")
        self.wait(1)
        self.assertEqual([self.successResultOf(each) for each in (first, third)], ["a", "c"])
        self.assertEqual([arguments for _, arguments in self.agent.asked], [{}, {"text": "c"}])

    def test_one_that_is_cancelled_later_ends_its_turn_with_its_answer(self) -> None:
        abandoned: list[object] = []
        work = self.connection.ask(Request("silent"), value, abandoned.append)
        first, second = start(work), self.echo("b")
        first.cancel()
        self.failureResultOf(first, CancelledError)
        self.assertNoResult(second)
        self.agent.answer("a")
        self.wait(1)
        self.assertEqual((abandoned, self.successResultOf(second)), (["a"], "b"))

    def test_who_waits_for_too_long_is_told_that_the_agent_is_busy(self) -> None:
        first = self.ask("silent", silence=1000.0, total=1000.0)
        second = self.echo("b")
        self.wait(61)
        self.assertIn("busy", str(self.failureResultOf(second, Unavailable).value))
        self.agent.answer("a")
        self.assertEqual(self.successResultOf(first), "a")

    def test_only_so_many_wait(self) -> None:
        waiting = [self.ask("silent") for _ in range(MOST_WAITING + 1)]
        self.failureResultOf(self.echo("x"), ResourceExhausted)
        self.connection.close()
        self.wait(100)
        for each in waiting:
            self.failureResultOf(each, Unavailable)


class SilenceTests(ConnectionCase):
    """An agent that does not answer."""

    def test_a_request_without_an_answer_is_given_up(self) -> None:
        asked = self.ask("silent")
        self.wait(29)
        self.assertNoResult(asked)
        self.wait(2)
        error = self.failureResultOf(asked, Unanswered).value
        self.assertIn("sandbox 1", str(error))

    def test_its_late_answer_is_nobody_elses(self) -> None:
        self.failed(self.ask("silent"))
        self.wait(1)
        self.agent.stale = b'{"return": "late"}\n'
        self.assertEqual(self.successResultOf(self.echo("b")), "b")
        self.assertEqual((self.agent.connections, self.agent.synchronised), (2, 2))

    def failed(self, asked: Deferred[object]) -> str:
        self.wait(61)
        return str(self.failureResultOf(asked, Unavailable).value)

    def test_an_answer_may_take_its_time_while_it_comes(self) -> None:
        asked = self.ask("silent", silence=30.0, total=100.0)
        for _ in range(3):
            self.wait(25)
            self.agent.send(b'{"return":' if _ == 0 else b" ")
        self.wait(20)
        self.agent.send(b'"slow"}\n')
        self.assertEqual(self.successResultOf(asked), "slow")

    def test_but_not_for_ever(self) -> None:
        asked = self.ask("silent", silence=30.0, total=100.0)
        for _ in range(5):
            self.wait(19.9)
            self.agent.send(b" ")
        self.wait(1)
        self.failureResultOf(asked, Unanswered)

    def test_without_an_agent_a_request_was_not_sent(self) -> None:
        self.agent.present = False
        asked = self.ask()
        self.wait(11)
        error = self.failureResultOf(asked, Unavailable).value
        self.assertNotIsInstance(error, Unanswered)

    def test_for_a_while_the_next_ones_fail_at_once_and_then_it_is_tried_again(self) -> None:
        self.agent.present = False
        self.failed_sync()
        self.assertIn("does not answer", str(self.failureResultOf(self.ask(), Unavailable).value))
        self.assertEqual(self.agent.connections, 1)
        self.agent.present = True
        self.wait(0.6)
        self.assertEqual(self.successResultOf(self.echo("there")), "there")

    def failed_sync(self) -> None:
        asked = self.ask()
        self.clock.advance(10.0)
        self.failureResultOf(asked, Unavailable)

    def test_that_while_is_five_seconds_at_most(self) -> None:
        self.agent.present = False
        for _ in range(8):
            self.failed_sync()
            self.wait(5.1)
        self.failed_sync()
        self.agent.present = True
        self.failureResultOf(self.ask(), Unavailable)
        self.wait(5.1)
        self.successResultOf(self.ask())

    def test_a_lost_connection_fails_the_request_and_the_next_has_another(self) -> None:
        asked = self.ask("silent")
        self.agent.lose()
        self.assertIn("lost", str(self.failureResultOf(asked, Unanswered).value))
        self.wait(0.6)
        self.assertEqual(self.successResultOf(self.echo("b")), "b")

    def test_a_connection_lost_between_two_requests_is_nobodys_failure(self) -> None:
        self.successResultOf(self.echo("a"))
        self.agent.lose()
        self.assertEqual(self.successResultOf(self.echo("b")), "b")

    def test_connections_that_are_refused_or_never_made(self) -> None:
        self.agent.refusing = True
        self.assertIn("refused", str(self.failureResultOf(self.ask(), Unavailable).value))
        self.agent.refusing, self.agent.hanging = False, True
        self.wait(1)
        asked = self.ask()
        self.wait(11)
        self.failureResultOf(asked, Unavailable)
        self.agent.hanging = False
        self.wait(2)
        self.successResultOf(self.ask())


class ReachTests(ConnectionCase):
    """Waiting for a guest that boots."""

    def test_it_is_there_at_once_if_the_agent_is(self) -> None:
        self.successResultOf(self.reach(1))
        self.assertEqual(self.agent.commands, ["guest-ping"])

    def test_it_waits_until_the_agent_has_started(self) -> None:
        self.agent.present = False
        reached = self.reach(300)
        self.wait(100)
        self.assertNoResult(reached)
        self.agent.present = True
        self.wait(11)
        self.successResultOf(reached)

    def test_it_waits_until_there_is_a_port(self) -> None:
        self.agent.refusing = True
        reached = self.reach(300)
        self.wait(100)
        self.agent.refusing = False
        self.wait(1)
        self.successResultOf(reached)

    def test_it_waits_no_longer_than_it_is_told(self) -> None:
        for setting in ("present", "refusing", "hanging"):
            setattr(self.agent, setting, setting != "present")
            reached = self.reach(3)
            self.wait(3.1 if setting != "hanging" else 13)
            self.failureResultOf(reached, Unavailable)
            setattr(self.agent, setting, setting == "present")

    def test_an_answer_that_never_ends_is_waited_for_no_longer_either(self) -> None:
        self.agent.handlers["guest-ping"] = lambda arguments: SILENT
        reached = self.reach(3)
        for _ in range(33):
            self.agent.send(b" ")
            self.wait(0.1)
        self.failureResultOf(reached, Unavailable)

    def test_others_are_told_at_once_meanwhile(self) -> None:
        self.agent.present = False
        reached = self.reach(300)
        self.wait(10.5)
        asked = self.ask()
        self.wait(10)
        self.failureResultOf(asked, Unavailable)
        reached.cancel()
        self.failureResultOf(reached, CancelledError)

    def test_a_pause_after_silence_is_not_its_own(self) -> None:
        self.agent.present = False
        asked = self.ask()
        self.clock.advance(10.0)
        self.failureResultOf(asked, Unavailable)
        self.agent.present = True
        self.successResultOf(self.reach(1))
        self.assertEqual(self.successResultOf(self.echo("b")), "b")


class NonsenseTests(ConnectionCase):
    """A hostile guest."""

    def nonsense(self, data: bytes = b"nonsense\n") -> str:
        self.agent.handlers["bad"] = lambda arguments: data
        return str(self.failureResultOf(self.ask("bad"), Unavailable).value)

    def test_its_connection_is_cut_and_the_reason_told(self) -> None:
        self.successResultOf(self.ask())
        transport = self.agent.transport
        assert transport is not None
        self.assertIn("no JSON", self.nonsense())
        self.assertTrue(transport.aborted)

    def test_it_is_left_alone_for_longer_and_longer(self) -> None:
        for pause in (1, 2, 4, 8, 16, 32, 60, 60):
            self.nonsense()
            connections = self.agent.connections
            self.wait(pause - 0.2)
            self.assertIn("no JSON", str(self.failureResultOf(self.ask(), Unavailable).value))
            self.assertEqual(self.agent.connections, connections)
            self.wait(0.4)
            self.successResultOf(self.ask())

    def test_after_ten_good_minutes_it_is_forgiven(self) -> None:
        for _ in range(5):
            self.nonsense()
            self.wait(17)
        self.wait(601)
        self.nonsense()
        self.wait(1.1)
        self.successResultOf(self.ask())

    def test_reach_waits_for_the_end_of_the_pause(self) -> None:
        self.nonsense()
        self.nonsense_later()
        reached = self.reach(10)
        self.assertNoResult(reached)
        self.wait(2.2)
        self.successResultOf(reached)
        self.wait(17)
        self.nonsense_later()
        self.failureResultOf(self.reach(0.5), Unavailable)

    def nonsense_later(self) -> None:
        self.wait(1.2)
        self.nonsense()

    def test_what_its_reader_takes_for_nonsense_is(self) -> None:
        def read(answer: Answer) -> None:
            raise Nonsense("something else in place of a number")

        asked = start(self.connection.ask(Request("echo"), read))
        self.assertIn("echo with something else", str(self.failureResultOf(asked, Unavailable).value))
        self.failureResultOf(self.ask(), Unavailable)
        self.wait(1.1)
        self.successResultOf(self.ask())

    def test_what_its_reader_raises_otherwise_is_no_fault_of_the_connection(self) -> None:
        def read(answer: Answer) -> None:
            raise ResourceExhausted("full")

        self.failureResultOf(start(self.connection.ask(Request("echo"), read)), ResourceExhausted)
        self.successResultOf(self.ask())
        self.assertEqual(self.agent.connections, 1)

    def test_endless_answers_are_cut_off(self) -> None:
        for pause in (2, 4):
            asked = self.ask("silent")
            sent = 0
            self.agent.send(b'{"return": "')
            while self.agent.transport is not None:
                self.agent.send(b"A" * 65536)
                sent += 65536
            self.assertLess(sent, 2 << 20)
            self.failureResultOf(asked, Unavailable)
            self.wait(pause)

    def test_an_endless_flood_in_place_of_a_synchronisation_is_cut_off(self) -> None:
        self.agent.present = False
        asked = self.ask()
        while self.agent.transport is not None:
            self.agent.send(b"A" * (1 << 20))
        self.failureResultOf(asked, Unavailable)

    def test_a_word_that_was_not_asked_for_ends_the_connection_alone(self) -> None:
        self.successResultOf(self.ask())
        self.agent.send(b'{"return": 1}\n')
        self.assertIsNone(self.agent.transport)
        self.assertEqual(self.successResultOf(self.echo("b")), "b")


class CloseTests(ConnectionCase):
    def test_requests_under_way_and_later_ones_are_unavailable(self) -> None:
        first, second = self.ask("silent"), self.echo("b")
        self.connection.close()
        self.connection.close()
        later = [self.echo("c"), self.reach(5)]
        self.wait(1)
        for each in (first, second, *later):
            self.failureResultOf(each, Unavailable)
        self.assertIsNone(self.agent.transport)

    def test_a_connection_that_is_being_made_is_not(self) -> None:
        self.agent.hanging = True
        asked = self.ask()
        self.connection.close()
        self.failureResultOf(asked, Unavailable)
