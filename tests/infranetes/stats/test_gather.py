# SPDX-License-Identifier: Apache-2.0
"""Stats of many VMs are gathered concurrently, with one call per VM at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from twisted.internet.defer import Deferred, succeed

from infranetes.stats.gather import CALL_SECONDS, FRESH_SECONDS, KEPT_SECONDS, WAIT_SECONDS, Gatherer
from infranetes_common.concurrency import start
from infranetes_common.errors import Unavailable
from infranetes_common.wire import vmserver
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import pod


class GatherTests(PodsTestCase):
    """Gathering with a virtual clock."""

    def setUp(self) -> None:
        super().setUp()
        self.gatherer = Gatherer(self.world.clock, self.world.listing)
        self.asked: list[str] = []

    def pods(self, count: int, answer: Callable[[], Any] | None = None) -> list[str]:
        """Run pods whose agents answer at once."""
        return [self.a_pod(f"p{number}", answer) for number in range(count)]

    def a_pod(self, name: str, answer: Callable[[], Any] | None = None) -> str:
        id = self.run_pod(pod(name, uid=name))
        self.answers(id, answer or (lambda: succeed(vmserver.StatsResponse())))
        return id

    def answers(self, id: str, answer: Callable[[], Any]) -> None:
        async def stats(within: float) -> Any:
            self.asked.append(id)
            self.assertEqual(within, CALL_SECONDS)
            return await answer()

        self.world.agents[id].stats = stats  # type: ignore[attr-defined]

    def ask(self) -> Any:
        asking = start(self.gatherer.now(list(self.world.node.inventory)))
        for _ in range(50):
            self.world.clock.advance(0)
        return asking

    def now(self) -> set[str]:
        return set(self.successResultOf(self.ask()))

    def test_all_that_answer_are_there(self) -> None:
        pods = self.pods(40)
        self.assertEqual(self.now(), set(pods))
        self.assertEqual(sorted(self.asked), sorted(pods))

    def test_a_list_waits_for_all_agents_with_one_timer(self) -> None:
        """Whatever it holds for each agent is paid a thousand times on a node with many pods."""
        waiting: list[Deferred[Any]] = [Deferred() for _ in range(40)]
        answers = iter(waiting)
        self.pods(40, lambda: next(answers))
        made = 0
        before = Deferred.__init__

        def counted(one: Deferred[Any], *arguments: Any) -> None:
            nonlocal made
            made += 1
            before(one, *arguments)

        with patch.object(Deferred, "__init__", counted):
            asking = self.ask()
            for each in waiting:
                each.callback(vmserver.StatsResponse())
        self.assertEqual(len(self.successResultOf(asking)), 40)
        self.assertLess(made, 40 + 10)  # one for each call itself

    def test_of_nothing_there_is_nothing(self) -> None:
        self.assertEqual(self.now(), set())

    def test_asked_again_at_once_agents_are_not(self) -> None:
        (id,) = self.pods(1)
        self.now()
        self.world.clock.advance(FRESH_SECONDS / 2)
        self.assertEqual(self.now(), {id})
        self.assertEqual(self.asked, [id])
        self.world.clock.advance(FRESH_SECONDS)
        self.assertEqual(self.now(), {id})
        self.assertEqual(self.asked, [id, id])

    def test_those_who_ask_together_share_the_call(self) -> None:
        waiting: Deferred[Any] = Deferred()
        (id,) = self.pods(1, lambda: waiting)
        asking = [self.ask() for _ in range(5)]
        waiting.callback(vmserver.StatsResponse())
        for one in asking:
            self.assertEqual(set(self.successResultOf(one)), {id})
        self.assertEqual(self.asked, [id])

    def test_a_silent_one_costs_one_list_its_wait_and_the_next_ones_nothing(self) -> None:
        silent: Deferred[object] = Deferred()
        slow = self.a_pod("slow", lambda: silent)
        others = self.pods(3)
        asking = self.ask()
        self.assertNoResult(asking)
        self.world.clock.advance(WAIT_SECONDS)
        self.assertEqual(set(self.successResultOf(asking)), set(others))
        for _ in range(3):
            self.world.clock.advance(1.0)
            self.assertEqual(self.now(), set(others))
        self.assertEqual(self.asked.count(slow), 1)
        silent.callback(vmserver.StatsResponse())
        self.assertEqual(self.now(), {slow, *others})
        self.answers(slow, lambda: succeed(vmserver.StatsResponse()))
        self.world.clock.advance(1.0)
        self.assertEqual(self.now(), {slow, *others})

    def test_one_that_can_not_be_reached_is_not_asked(self) -> None:
        gone, *others = self.pods(3)
        self.world.agents[gone].go_away()
        self.world.wait(1.0)
        self.assertEqual(self.now(), set(others))
        self.assertNotIn(gone, self.asked)

    def test_one_that_fails_is_left_out_and_asked_again(self) -> None:
        bad, good = self.pods(2)

        def fail() -> Any:
            raise Unavailable("lost")

        self.answers(bad, fail)
        self.assertEqual(self.now(), {good})
        self.world.clock.advance(1.0)
        self.now()
        self.assertEqual(self.asked.count(bad), 2)

    def test_one_that_is_stopped_is_left_out(self) -> None:
        stopped, other = self.pods(2)
        self.do(self.world.sandboxes.stop(stopped))
        self.assertEqual(self.now(), {other})

    def test_last_figures_are_kept_for_a_while(self) -> None:
        (id,) = self.pods(1)
        self.now()
        self.world.agents[id].go_away()
        self.world.wait(KEPT_SECONDS - 1)
        self.assertIsNotNone(self.gatherer.last(id))
        self.assertEqual(self.now(), set())
        self.world.wait(2.0)
        self.assertIsNone(self.gatherer.last(id))
        self.now()
        self.assertEqual(self.gatherer._last, {})

    def test_nothing_is_kept_of_what_is_removed(self) -> None:
        waiting: Deferred[Any] = Deferred()
        (id,) = self.pods(1)
        self.now()
        self.world.clock.advance(1.0)
        self.answers(id, lambda: waiting)
        asking = self.ask()
        self.do(self.world.sandboxes.remove(id))
        waiting.callback(vmserver.StatsResponse())
        self.assertEqual(self.successResultOf(asking), {})
        self.now()
        self.assertEqual(
            (self.gatherer._last, self.gatherer._asking, self.gatherer._slow), ({}, set(), set())
        )

    def test_one_who_asks_no_longer_leaves_the_call_to_the_others(self) -> None:
        waiting: Deferred[Any] = Deferred()
        (id,) = self.pods(1, lambda: waiting)
        gone, stays = self.ask(), self.ask()
        gone.addErrback(lambda _: None)
        gone.cancel()
        waiting.callback(vmserver.StatsResponse())
        self.assertEqual(set(self.successResultOf(stays)), {id})
