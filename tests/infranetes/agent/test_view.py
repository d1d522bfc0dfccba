"""The view of one VM's containers, kept from its agent's stream."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import DeferredSemaphore
from twisted.internet.task import Clock
from twisted.trial import unittest
from zope.interface import implementer
from zope.interface.verify import verifyObject

from infranetes.agent.view import LAST_DELAY, AgentView, IViewListener, Reach, ViewTimes
from infranetes_common import cri
from tests.infranetes.pods.fakes import FakeAgent


@implementer(IViewListener)
class Listener:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def asking(self) -> None:
        self.told.append("asking")

    def snapshot(self, states: dict[str, Any]) -> None:
        self.told.append(sorted(states))

    def changed(self, state: Any) -> None:
        self.told.append((state.id, state.state))

    def removed(self, container_id: str) -> None:
        self.told.append(f"{container_id} removed")

    def reach_changed(self, reach: Reach) -> None:
        self.told.append(reach)


class ViewTests(unittest.SynchronousTestCase):
    """One agent that comes and goes."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.agent = FakeAgent("s")
        self.listener = Listener()
        self.gate = DeferredSemaphore(1)
        self.view = self.make(self.agent, self.listener)

    def make(self, agent: FakeAgent, listener: Any) -> AgentView:
        times = ViewTimes(attempt=10.0, unknown_after=5.0)
        view = AgentView(self.clock, agent, listener, self.gate, times)  # type: ignore[arg-type]
        self.addCleanup(view.stop)
        return view

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds * 10)):
            self.clock.advance(0.1)

    def test_its_listener_is_one(self) -> None:
        verifyObject(IViewListener, self.listener)

    def test_first_the_snapshot_then_what_changes(self) -> None:
        self.agent.become("a", cri.CONTAINER_RUNNING)
        self.view.start()
        self.agent.become("b", cri.CONTAINER_CREATED)
        self.successResultOf(self._remove("a"))
        self.assertEqual(
            self.listener.told,
            ["asking", ["a"], Reach.LIVE, ("b", cri.CONTAINER_CREATED), "a removed"],
        )
        self.assertTrue(self.view.live)

    def _remove(self, container: str) -> Any:
        from infranetes.pods.waits import go

        return go(self.agent.remove(container))

    def test_a_lost_stream_is_had_again_at_once(self) -> None:
        self.view.start()
        self.agent.go_away()
        self.agent.away = False
        self.assertIs(self.view.reach, Reach.TROUBLED)
        self.assertTrue(self.view.hopeful)
        self.wait(0.2)
        self.assertTrue(self.view.live)
        self.assertEqual(self.listener.told.count("asking"), 2)

    def test_it_is_unreachable_only_after_a_while(self) -> None:
        self.view.start()
        self.agent.go_away()
        self.wait(4.9)
        self.assertIs(self.view.reach, Reach.TROUBLED)
        self.assertFalse(self.view.hopeful)
        self.wait(0.2)
        self.assertIs(self.view.reach, Reach.UNREACHABLE)
        self.assertIn("refused", self.view.trouble)
        self.agent.away = False
        self.wait(LAST_DELAY + 1)
        self.assertIs(self.view.reach, Reach.LIVE)
        self.assertEqual(self.view.trouble, "")

    def test_attempts_become_rare_but_never_end(self) -> None:
        self.agent.away = True
        self.view.start()
        self.wait(600)
        attempts = self.listener.told.count("asking")
        self.assertGreater(attempts, 600 / LAST_DELAY - 5)
        self.assertLess(attempts, 600 / LAST_DELAY + 15)

    def test_a_snapshot_that_is_never_complete_is_no_snapshot(self) -> None:
        self.agent.silent = True
        self.view.start()
        self.wait(9.8)
        self.assertIs(self.view.reach, Reach.UNTRIED)
        self.assertTrue(self.view.hopeful)
        self.wait(0.3)
        self.assertFalse(self.view.hopeful)
        self.assertNotIn([], self.listener.told)
        self.agent.silent = False
        self.wait(1)
        self.assertTrue(self.view.live)

    def test_who_waits_is_told_when_it_is_live_and_not_before(self) -> None:
        self.agent.away = True
        live, told = self.view.when_live(), self.view.when_told()
        self.view.start()
        self.successResultOf(told)
        self.assertNoResult(live)
        self.agent.away = False
        self.wait(1)
        self.successResultOf(live)
        self.successResultOf(self.view.when_live())

    def test_attempts_of_many_go_through_the_gate(self) -> None:
        """One that does not answer keeps its place for its time, then the next has it."""
        self.agent.silent = True
        other_agent, other_listener = FakeAgent("t"), Listener()
        other = self.make(other_agent, other_listener)
        self.view.start()
        other.start()
        self.wait(9)
        self.assertEqual(other_listener.told, [])
        self.wait(2)
        self.assertTrue(other.live)

    def test_one_whose_turn_has_not_come_is_not_called_unreachable(self) -> None:
        self.agent.silent = True
        other = self.make(FakeAgent("t"), Listener())
        self.view.start()
        other.start()
        self.wait(8)
        self.assertIs(other.reach, Reach.UNTRIED)

    def test_stopped_it_tells_nothing_more(self) -> None:
        self.view.start()
        waiting = self.view.when_live()
        self.view.stop()
        self.view.stop()
        self.successResultOf(waiting)
        told = list(self.listener.told)
        self.agent.become("a", cri.CONTAINER_RUNNING)
        self.wait(60)
        self.assertEqual(self.listener.told, told)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_stopped_while_it_waits_for_its_turn(self) -> None:
        self.agent.silent = True
        other = self.make(FakeAgent("t"), Listener())
        self.view.start()
        other.start()
        other.stop()
        self.view.stop()
        self.assertEqual(self.gate.tokens, 1)
        self.assertEqual(self.clock.getDelayedCalls(), [])
