# SPDX-License-Identifier: Apache-2.0
"""The Watch stream of one VM's agent."""

from __future__ import annotations

import itertools
from typing import Any

from twisted.internet.defer import DeferredSemaphore
from twisted.internet.task import Clock
from twisted.trial import unittest
from zope.interface import implementer
from zope.interface.verify import verifyObject

from infranetes.machines.agent.container_watch import (
    LAST_DELAY,
    REFUSED_DELAY,
    ContainerWatch,
    IContainerListener,
    Reach,
    WatchTimes,
)
from infranetes.machines.agent.limits import CHANGES, CHANGES_PER_SECOND, CONTAINERS
from infranetes_common.wire import cri, vmserver
from tests.infranetes.pods.fake_agent import FakeAgent
from txgrpc import Code, GrpcError


@implementer(IContainerListener)
class Listener:
    """Records its calls."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def snapshot_requested(self) -> None:
        self.told.append("requested")

    def snapshot(self, states: dict[str, Any]) -> None:
        self.told.append(sorted(states))

    def changed(self, state: Any) -> None:
        self.told.append((state.id, state.state))

    def removed(self, container_id: str) -> None:
        self.told.append(f"{container_id} removed")

    def interrupted(self, interruption: vmserver.Interruption) -> None:
        self.told.append(interruption.reason)

    def reach_changed(self, reach: Reach) -> None:
        self.told.append(reach)


class WatchCase(unittest.SynchronousTestCase):
    """One agent."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.agent = FakeAgent("s")
        self.listener = Listener()
        self.gate = DeferredSemaphore(1)
        self.watch = self.make(self.agent, self.listener)

    def make(self, agent: FakeAgent, listener: Any) -> ContainerWatch:
        times = WatchTimes(attempt=10.0, unreachable_after=5.0, unknown_after=60.0)
        watch = ContainerWatch(self.clock, agent, listener, self.gate, times)  # type: ignore[arg-type]
        self.addCleanup(watch.stop)
        return watch

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds * 10)):
            self.clock.advance(0.1)


class WatchTests(WatchCase):
    """The stream breaks and is opened again."""

    def test_the_end_of_the_vm_is_told(self) -> None:
        self.watch.start()
        notice = vmserver.WatchEvent(interruption=vmserver.Interruption(reason="spot"))
        self.agent.streams[0].feed(notice)
        self.assertEqual(self.listener.told[-1], "spot")

    def test_its_listener_is_one(self) -> None:
        verifyObject(IContainerListener, self.listener)

    def test_first_the_snapshot_then_what_changes(self) -> None:
        self.agent.become("a", cri.CONTAINER_RUNNING)
        self.watch.start()
        self.agent.become("b", cri.CONTAINER_CREATED)
        self.successResultOf(self._remove("a"))
        self.assertEqual(
            self.listener.told,
            ["requested", ["a"], Reach.LIVE, ("b", cri.CONTAINER_CREATED), "a removed"],
        )
        self.assertTrue(self.watch.live)

    def _remove(self, container: str) -> Any:
        from infranetes_common.concurrency import start

        return start(self.agent.remove(container))

    def test_a_lost_stream_is_had_again_at_once(self) -> None:
        self.watch.start()
        self.agent.go_away()
        self.agent.away = False
        self.assertIs(self.watch.reach, Reach.TROUBLED)
        self.assertTrue(self.watch.worth_waiting)
        self.wait(0.2)
        self.assertTrue(self.watch.live)
        self.assertEqual(self.listener.told.count("requested"), 2)
        self.wait(70)
        self.assertIs(self.watch.reach, Reach.LIVE, "as long as it was away does not count any more")

    def test_back_after_several_attempts_it_stays_live(self) -> None:
        self.watch.start()
        self.agent.go_away()
        self.wait(3)
        self.assertEqual(self.listener.told.count(Reach.TROUBLED), 1, "it is told once, not at each attempt")
        self.agent.away = False
        self.wait(LAST_DELAY + 70)
        self.assertIs(self.listener.told[-1], Reach.LIVE)

    def test_a_stream_that_the_agent_ends_is_trouble_until_the_next_is_live(self) -> None:
        self.watch.start()
        self.agent.streams[0].break_(StopAsyncIteration())
        self.assertIs(self.watch.reach, Reach.TROUBLED)
        self.assertTrue(self.watch.trouble)
        self.wait(0.2)
        self.assertEqual((self.watch.reach, self.watch.trouble), (Reach.LIVE, ""))

    def test_it_has_one_stream_and_none_after_its_end(self) -> None:
        for _ in range(2):
            self.watch.start()
        self.assertEqual(self.listener.told.count("requested"), 1)
        never = self.make(self.agent, other := Listener())
        for stopped in (self.watch, never):
            stopped.stop()
            stopped.start()
        self.wait(1)
        self.assertEqual((self.listener.told.count("requested"), other.told), (1, []))

    def test_it_is_unreachable_only_after_a_while(self) -> None:
        self.watch.start()
        self.agent.go_away()
        self.wait(4.9)
        self.assertIs(self.watch.reach, Reach.TROUBLED)
        self.assertFalse(self.watch.worth_waiting)
        self.wait(0.2)
        self.assertIs(self.watch.reach, Reach.UNREACHABLE)
        self.assertIn("refused", self.watch.trouble)
        self.agent.away = False
        self.wait(LAST_DELAY + 1)
        self.assertIs(self.watch.reach, Reach.LIVE)
        self.assertEqual(self.watch.trouble, "")

    def test_what_it_said_last_counts_for_much_longer(self) -> None:
        self.watch.start()
        self.agent.go_away()
        self.wait(59.9)
        self.assertIs(self.watch.reach, Reach.UNREACHABLE)
        self.wait(0.2)
        self.assertIs(self.watch.reach, Reach.SILENT)
        self.assertTrue(self.watch.unreachable)
        self.agent.away = False
        self.wait(LAST_DELAY + 1)
        self.assertIs(self.watch.reach, Reach.LIVE)
        self.agent.go_away()
        self.wait(59.9)
        self.assertIs(self.watch.reach, Reach.UNREACHABLE)

    def test_attempts_become_rare_but_never_end(self) -> None:
        self.agent.away = True
        self.watch.start()
        self.wait(600)
        attempts = self.listener.told.count("requested")
        self.assertGreater(attempts, 600 / LAST_DELAY - 5)
        self.assertLess(attempts, 600 / LAST_DELAY + 15)

    def test_a_snapshot_that_is_never_complete_is_no_snapshot(self) -> None:
        self.agent.silent = True
        self.watch.start()
        self.wait(9.8)
        self.assertIs(self.watch.reach, Reach.UNTRIED)
        self.assertTrue(self.watch.worth_waiting)
        self.wait(0.3)
        self.assertFalse(self.watch.worth_waiting)
        self.assertNotIn([], self.listener.told)
        self.agent.silent = False
        self.wait(1)
        self.assertTrue(self.watch.live)

    def test_who_waits_is_told_when_it_is_live_and_not_before(self) -> None:
        self.agent.away = True
        live, told = self.watch.when_live(), self.watch.when_attempted()
        self.watch.start()
        self.successResultOf(told)
        self.assertNoResult(live)
        self.agent.away = False
        self.wait(1)
        self.successResultOf(live)
        self.successResultOf(self.watch.when_live())

    def test_who_waits_for_the_next_attempt_is_told_when_it_has_failed(self) -> None:
        self.watch.start()
        self.successResultOf(self.watch.when_attempted())
        self.agent.go_away()
        told = self.watch.when_attempted()
        self.assertNoResult(told)
        self.wait(0.2)
        self.successResultOf(told)
        again = self.watch.when_attempted()
        self.assertNoResult(again)
        self.watch.stop()
        self.successResultOf(again)
        self.successResultOf(self.watch.when_attempted())

    def test_stopped_by_its_listener_it_tells_nothing_more(self) -> None:
        self.watch.start()
        self.patch(self.listener, "changed", lambda state: self.watch.stop())
        stream = self.agent.streams[0]
        told = list(self.listener.told)
        for id in ("a", "b"):
            state = vmserver.ContainerState(id=id, state=cri.CONTAINER_RUNNING)
            stream.feed(vmserver.WatchEvent(container=state))
            stream.feed(vmserver.WatchEvent(removed=id))
        self.wait(60)
        self.assertEqual(self.listener.told, told)

    def test_attempts_of_many_go_through_the_gate(self) -> None:
        """An agent that does not answer keeps its place until the timeout, then the next has it."""
        self.agent.silent = True
        other_agent, other_listener = FakeAgent("t"), Listener()
        other = self.make(other_agent, other_listener)
        self.watch.start()
        other.start()
        self.wait(9)
        self.assertEqual(other_listener.told, [])
        self.wait(2)
        self.assertTrue(other.live)

    def test_one_whose_turn_has_not_come_is_not_called_unreachable(self) -> None:
        self.agent.silent = True
        other = self.make(FakeAgent("t"), Listener())
        self.watch.start()
        other.start()
        self.wait(8)
        self.assertIs(other.reach, Reach.UNTRIED)

    def test_stopped_it_tells_nothing_more(self) -> None:
        self.watch.start()
        waiting = self.watch.when_live()
        self.watch.stop()
        self.watch.stop()
        self.successResultOf(waiting)
        told = list(self.listener.told)
        self.agent.become("a", cri.CONTAINER_RUNNING)
        self.wait(60)
        self.assertEqual(self.listener.told, told)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_stopped_while_its_agent_is_away_it_is_not_called_unreachable(self) -> None:
        self.watch.start()
        self.agent.go_away()
        self.watch.stop()
        told = list(self.listener.told)
        self.wait(70)
        self.assertEqual((self.listener.told, self.clock.getDelayedCalls()), (told, []))

    def test_stopped_while_it_waits_for_its_turn(self) -> None:
        self.agent.silent = True
        other = self.make(FakeAgent("t"), Listener())
        self.watch.start()
        other.start()
        other.stop()
        self.watch.stop()
        self.assertEqual(self.gate.tokens, 1)
        self.assertEqual(self.clock.getDelayedCalls(), [])


class PauseTests(WatchCase):
    """The VM sleeps, and is woken."""

    def test_what_was_told_last_counts_and_nobody_asks(self) -> None:
        self.agent.become("a", cri.CONTAINER_RUNNING)
        self.watch.start()
        self.watch.pause()
        self.watch.pause()
        self.assertIs(self.watch.reach, Reach.ASLEEP)
        self.assertTrue(self.watch.unreachable)
        self.assertFalse(self.watch.worth_waiting)
        told = list(self.listener.told)
        self.assertEqual(told.count(Reach.ASLEEP), 1)
        self.agent.become("b", cri.CONTAINER_CREATED)
        self.wait(120)  # by which one that is lost would be silent
        self.assertEqual(self.listener.told, told)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_awake_it_is_asked_at_once(self) -> None:
        self.watch.start()
        self.watch.pause()
        self.watch.resume()
        self.watch.resume()
        self.assertTrue(self.watch.live)
        self.assertEqual(self.listener.told[-4:], [Reach.UNTRIED, "requested", [], Reach.LIVE])

    def test_one_that_is_paused_from_the_beginning_starts_when_it_is_awake(self) -> None:
        self.watch.pause()
        self.watch.start()
        self.assertEqual(self.agent.streams, [])
        self.watch.resume()
        self.assertTrue(self.watch.live)

    def test_one_that_is_lost_as_it_falls_asleep_is_no_longer_troubled(self) -> None:
        self.watch.start()
        self.agent.go_away()
        self.wait(7)
        self.assertIs(self.watch.reach, Reach.UNREACHABLE)
        self.watch.pause()
        self.agent.away = False
        self.wait(120)
        self.assertIs(self.watch.reach, Reach.ASLEEP)
        self.assertEqual(self.watch.trouble, "")
        self.watch.resume()
        self.assertTrue(self.watch.live)

    def test_a_stopped_one_neither_pauses_nor_resumes(self) -> None:
        self.watch.start()
        self.watch.pause()
        self.watch.stop()
        told = list(self.listener.told)
        self.watch.resume()
        self.watch.pause()
        self.wait(10)
        self.assertEqual(self.listener.told, told)
        self.assertEqual(self.clock.getDelayedCalls(), [])


class HostileTests(WatchCase):
    """The agent sends more than it should."""

    def say(self, number: int) -> None:
        state = vmserver.ContainerState(id=f"c{number}", state=cri.CONTAINER_RUNNING)
        self.agent.streams[-1].feed(vmserver.WatchEvent(container=state))

    def quiet_for_a_while(self) -> None:
        """Check that the stream is ended and that it is not reopened for some seconds."""
        attempts = self.listener.told.count("requested")
        self.assertTrue(self.agent.streams[-1].ended)
        self.assertFalse(self.watch.live)
        self.wait(REFUSED_DELAY - 0.2)
        self.assertEqual(self.listener.told.count("requested"), attempts)
        self.wait(1.0)
        self.assertEqual(self.listener.told.count("requested"), attempts + 1)

    def test_a_snapshot_is_of_so_many_containers(self) -> None:
        self.agent.silent = True
        self.watch.start()
        for number in range(CONTAINERS + 1):
            self.say(number)
        self.assertIn("over 256 containers", self.watch.trouble)
        self.quiet_for_a_while()

    def test_changes_are_as_many_as_containers_can_have(self) -> None:
        self.watch.start()
        for number in range(CHANGES + 1):
            self.say(number % 7)
        self.assertIn("more changes", self.watch.trouble)
        self.assertLessEqual(len(self.listener.told), CHANGES + 10)
        self.quiet_for_a_while()

    def test_changes_in_the_long_run(self) -> None:
        self.watch.start()
        for second in range(100):
            for number in range(int(CHANGES_PER_SECOND)):
                self.say(second + number)
            self.wait(1.0)
        self.assertTrue(self.watch.live)
        self.assertEqual(self.listener.told.count("requested"), 1)

    def test_after_words_that_were_refused_attempts_become_rare_as_after_others(self) -> None:
        times: list[float] = []

        def refuse() -> Any:
            times.append(self.clock.seconds())
            raise GrpcError(Code.INVALID_ARGUMENT, "nonsense")

        self.patch(self.agent, "watch", refuse)
        self.watch.start()
        self.wait(60)
        pauses = [round(later - earlier) for earlier, later in itertools.pairwise(times)]
        self.assertEqual(pauses[:3], [5, 10, 15])

    def test_words_that_were_refused(self) -> None:
        self.watch.start()
        self.agent.streams[-1].ended = True
        self.agent.streams[-1].break_(GrpcError(Code.RESOURCE_EXHAUSTED, "a message of 8 MiB"))
        self.assertIn("8 MiB", self.watch.trouble)
        self.quiet_for_a_while()
