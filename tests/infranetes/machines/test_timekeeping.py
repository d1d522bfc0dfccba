# SPDX-License-Identifier: Apache-2.0
"""VMs with wrong clocks are sent the time, by a clock that the test controls."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.logger import LogLevel, capturedLogs, formatEvent

from infranetes.machines.agent.client import AgentClient
from infranetes.machines.clock_reading import LONGEST_NANOS, TOLERANCE_NANOS, ClockReading, correct_clock
from infranetes.machines.pool_config import PoolConfig, PoolSize
from infranetes.machines.timekeeping import FIRST_SECONDS, ROUND_SECONDS
from infranetes_common.errors import NotOffered, Unavailable
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fake_agent import FakeAgent
from tests.infranetes.pods.fakes import FakeNode, pod

SECOND = 10**9


class _Node(FakeNode):
    """A node whose VMs' clocks are wrong from the start.

    :ivar ahead: by how many nanoseconds. :ivar has_steady: whether their agents can correct them.
    """

    ahead = 0
    has_steady = True

    def make_agent(self, sandbox_id: str) -> FakeAgent:
        agent = FakeAgent(sandbox_id)
        agent.clocks = lambda: (self.now() + self.ahead, 7 if self.has_steady else 0)
        return agent


class TimekeepingTests(PodsTestCase):
    world: _Node

    def make_world(self) -> FakeNode:
        return _Node(pool=PoolConfig(sizes=(PoolSize(count=1),)), launch=60.0, sweep=1e6)

    def setUp(self) -> None:
        super().setUp()
        self.own = self.run_own("own")
        self.agent = self.world.agents[self.own]

    def run_own(self, name: str) -> str:
        """Run a pod that does not get a VM from the pool."""
        return self.run_pod(pod(name, annotations={"infranetes.io/size": "x"}))

    def test_clocks_that_are_right_are_left_alone(self) -> None:
        for ahead in (0, TOLERANCE_NANOS // 2, -TOLERANCE_NANOS // 2):
            self.world.ahead = ahead
            self.world.wait(3 * ROUND_SECONDS)
        self.assertEqual(self.agent.corrections, [])

    def test_one_that_goes_wrong_is_corrected_within_a_minute(self) -> None:
        for ahead in (3 * SECOND, -3600 * SECOND):
            self.agent.corrections.clear()
            self.world.ahead = ahead
            with capturedLogs() as logged:
                self.world.wait(ROUND_SECONDS + FIRST_SECONDS)
            steady, earliest, latest = self.agent.corrections[-1]
            self.assertEqual((steady, earliest), (7, latest))
            ways = {event["way"] for event in logged if "way" in event}
            self.assertEqual(ways, {"ahead" if ahead > 0 else "behind"})
            self.assertLessEqual(self.world.now() - latest, (ROUND_SECONDS + FIRST_SECONDS) * SECOND)

    def test_so_is_one_of_the_pool(self) -> None:
        (member,) = self.world.node.pools.own.idle()
        self.world.ahead = SECOND
        self.world.wait(2 * ROUND_SECONDS)
        self.assertTrue(self.world.agents[member.id].corrections)

    def test_one_that_is_wrong_from_the_boot_on_is_corrected_before_it_has_a_pod(self) -> None:
        self.world.ahead = -50 * SECOND
        other = self.run_own("other")
        self.assertEqual(len(self.world.agents[other].corrections), 1)

    def test_one_that_can_not_be_corrected_has_its_pod_all_the_same(self) -> None:
        self.world.ahead = SECOND
        make = self.world.make_agent

        def refusing(sandbox_id: str) -> FakeAgent:
            agent = make(sandbox_id)
            agent.correct_error = NotOffered("not this one")
            return agent

        self.patch(self.world, "make_agent", refusing)
        with capturedLogs() as logged:
            other = self.run_own("other")
        self.assertEqual(self.world.agents[other].corrections, [])
        told = [formatEvent(event) for event in logged if event["log_level"] is LogLevel.warn]
        self.assertEqual(
            len([words for words in told if "is not corrected for now: not this one" in words]), 1
        )

    def test_agents_without_a_steady_clock_are_told_nothing(self) -> None:
        self.world.has_steady, self.world.ahead = False, SECOND
        self.world.wait(2 * ROUND_SECONDS)
        self.assertEqual(self.agent.corrections, [])

    def test_one_that_does_not_answer_keeps_no_other_waiting(self) -> None:
        other = self.world.agents[self.run_own("other")]

        async def info(within: float = 30.0) -> Any:
            never: Deferred[object] = Deferred()
            return await never

        self.patch(self.agent, "info", info)
        self.world.ahead = SECOND
        self.world.wait(3 * ROUND_SECONDS)
        self.assertGreaterEqual(len(other.corrections), 2)

    def test_why_one_can_not_be_read_now_is_in_the_log_for_whoever_looks(self) -> None:
        async def fail(within: float = 30.0) -> Any:
            raise Unavailable("its agent is away")

        self.patch(self.agent, "info", fail)
        with capturedLogs() as logged:
            self.world.wait(2 * ROUND_SECONDS)
        told = [event for event in logged if "can't be read now" in str(event.get("log_format"))]
        self.assertTrue(told)
        self.assertEqual({event["log_level"] for event in told}, {LogLevel.debug})
        self.assertEqual({event["vm"] for event in told}, {self.own})

    def test_an_unforeseen_error_of_one_is_told_and_hinders_no_other(self) -> None:
        other = self.world.agents[self.run_own("other")]

        async def fail(within: float = 30.0) -> Any:
            raise ZeroDivisionError("unforeseen")

        self.patch(self.agent, "info", fail)
        self.world.ahead = SECOND
        self.world.wait(2 * ROUND_SECONDS)
        self.assertTrue(self.flushLoggedErrors(ZeroDivisionError))
        self.assertTrue(other.corrections)

    def test_an_unforeseen_error_of_a_whole_round_ends_that_round_alone(self) -> None:
        def fail() -> None:
            raise ZeroDivisionError("unforeseen")

        restored = self.patch(self.world.node.pools.own, "idle", fail)
        self.world.wait(2 * ROUND_SECONDS)
        self.assertTrue(self.flushLoggedErrors(ZeroDivisionError))
        restored.restore()
        self.world.ahead = SECOND
        self.world.wait(2 * ROUND_SECONDS)
        self.assertTrue(self.agent.corrections)

    def test_the_next_daemon_goes_on_with_it(self) -> None:
        self.world.ahead = SECOND
        self.world.restart()
        self.world.wait(ROUND_SECONDS)
        self.assertTrue(self.agent.corrections)

    def test_what_is_asked_when_the_daemon_stops_is_given_up_and_nothing_else_is_kept(self) -> None:
        self.world.wait(ROUND_SECONDS)
        self.assertEqual(self.world.node.timekeeping._asked, set())
        asked: list[int] = []
        given_up: list[int] = []

        async def info(within: float = 30.0) -> Any:
            asked.append(number := len(asked))
            never: Deferred[Any] = Deferred(lambda _: given_up.append(number))
            return await never

        self.patch(self.agent, "info", info)
        self.world.wait(ROUND_SECONDS + FIRST_SECONDS)
        self.world.node.timekeeping.stop()
        self.assertTrue(asked)
        self.assertEqual(sorted(given_up), asked)

    def test_none_is_asked_once_the_daemon_stops(self) -> None:
        self.world.node.timekeeping.stop()
        self.world.ahead = SECOND
        self.world.wait(2 * ROUND_SECONDS)
        self.assertEqual(self.agent.corrections, [])


class ReadingTests(PodsTestCase):
    def test_a_clock_is_wrong_only_where_it_was_at_no_time_of_the_question(self) -> None:
        for machine, ahead in ((99, -1), (100, 0), (150, 0), (200, 0), (203, 3)):
            self.assertEqual(ClockReading(machine, 7, 100, 200).ahead, ahead)

    def test_a_clock_that_is_as_wrong_as_is_tolerated_is_left_alone(self) -> None:
        for wrong, corrected in ((TOLERANCE_NANOS, 0), (TOLERANCE_NANOS + 1, 1)):
            for ahead in (wrong, -wrong):
                agent = FakeAgent("s")
                reading = ClockReading(1000 * SECOND + ahead, 7, 1000 * SECOND, 1000 * SECOND)
                self.do(correct_clock("s", cast(AgentClient, agent), reading))
                self.assertEqual(len(agent.corrections), corrected, ahead)

    def test_a_question_that_took_long_tells_nothing_nor_one_in_which_the_node_was_set_back(self) -> None:
        self.assertTrue(ClockReading(1, 7, 0, LONGEST_NANOS).usable)
        self.assertFalse(ClockReading(1, 7, 0, LONGEST_NANOS + 1).usable)
        self.assertFalse(ClockReading(1, 7, 5, 4).usable)
