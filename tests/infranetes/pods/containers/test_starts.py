# SPDX-License-Identifier: Apache-2.0
"""StartContainer when something happens meanwhile, or second."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred

from infranetes.pods.node.inventory import Container
from infranetes.pods.store.states import ContainerState
from infranetes_common.concurrency import start
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.wire import cri, vmserver
from tests.infranetes.pods.case import ContainersTestCase

EXITED = ContainerState.EXITED


class StartCase(ContainersTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.made = self.create()
        self.container: Container = self.world.node.inventory.containers[self.made]

    def start_it(self) -> Deferred[None]:
        return start(self.world.containers.start(self.made))

    def hold(self, name: str = "start") -> Deferred[Any]:
        """Have the agent do what it is asked for when this fires; what it fires with, if that is a state or
        an error, is the answer in place of its own."""
        held: Deferred[Any] = Deferred()
        real = getattr(self.agent, name)

        async def slowly(*given: Any, **named: Any) -> Any:
            waiting: Deferred[Any] = Deferred()
            held.addCallback(lambda answer: waiting.callback(answer))
            answer = await waiting
            if isinstance(answer, Exception):
                raise answer
            return answer or await real(*given, **named)

        self.patch(self.agent, name, slowly)
        return held

    def fails(self, error: Exception) -> None:
        """Have a start fail so."""
        self.hold().callback(error)
        self.failureResultOf(self.start_it(), type(error))

    def hold_records(self) -> Deferred[None]:
        """Have containers' records written when this fires."""
        on_disk: Deferred[None] = Deferred()
        put = self.world.store.put_container

        def slowly(record: Any) -> Deferred[None]:
            written: Deferred[None] = Deferred()
            on_disk.addCallback(lambda _: put(record).chainDeferred(written))
            return written

        self.patch(self.world.store, "put_container", slowly)
        return on_disk

    def end_vm(self) -> None:
        (instance,) = self.world.provider.instances
        self.world.provider.end(instance, "power")

    def ran(self, **fields: Any) -> vmserver.ContainerState:
        return vmserver.ContainerState(
            id=self.made, state=cri.CONTAINER_EXITED, started_at=6, finished_at=7, reason="Error", **fields
        )


class MeanwhileTests(StartCase):
    def test_a_caller_that_goes_away_leaves_it_to_run(self) -> None:
        held = self.hold()
        call = self.start_it()
        call.cancel()
        self.failureResultOf(call)
        held.callback(None)
        self.assertIs(self.kept(self.made).state, ContainerState.RUNNING)
        self.assertIsNone(self.container.starting)

    def test_its_vm_ends_while_that_is_recorded(self) -> None:
        on_disk = self.hold_records()
        call = self.start_it()
        self.end_vm()
        held = self.hold()
        on_disk.callback(None)
        words = str(self.failureResultOf(call, FailedPrecondition).value)
        self.assertIn("has ended, and runs once", words)
        self.assertFalse(held.called)
        self.assertIs(self.container.state, EXITED)

    def test_its_vm_ends_while_the_agent_starts_it(self) -> None:
        held = self.hold()
        call = self.start_it()
        self.end_vm()
        held.callback(None)
        self.assertIn("ended with its VM", str(self.failureResultOf(call, Unavailable).value))
        self.assertEqual((self.kept(self.made).state, self.kept(self.made).reason), (EXITED, "VMEnded"))

    def test_that_it_runs_can_not_be_recorded(self) -> None:
        held = self.hold()
        call = self.start_it()
        self.world.store.failing = ResourceExhausted("full")
        held.callback(None)
        self.successResultOf(call)
        self.assertIs(self.container.state, ContainerState.RUNNING)
        self.world.store.failing = None

    def test_it_has_ended_when_its_start_is_answered(self) -> None:
        self.agent.streams.clear()
        self.hold().callback(self.ran(exit_code=3))
        self.successResultOf(self.start_it())
        self.assertEqual((self.kept(self.made).state, self.kept(self.made).exit_code), (EXITED, 3))
        self.assertEqual(self.kept(self.made).started_at, 6)

    def test_a_stop_waits_for_it(self) -> None:
        held = self.hold()
        call = self.start_it()
        stopping = start(self.world.containers.stop(self.made, 1))
        self.assertNotIn(("stop 1", self.made), self.agent.calls)
        held.callback(None)
        self.successResultOf(call)
        self.successResultOf(stopping)
        self.assertIn(("stop 1", self.made), self.agent.calls)


class LostTests(StartCase):
    """The answer to a start was lost: it may run."""

    def test_whatever_error_says_so_nothing_is_stopped_and_it_may_be_started_again(self) -> None:
        for error in (Unavailable("cut"), DeadlineExceeded("no answer"), InfranetesError("odd")):
            self.setUp()
            self.fails(error)
            self.assertIs(self.kept(self.made).state, ContainerState.STARTING)
            self.assertEqual([call for call, _ in self.agent.calls if call.startswith("stop")], [])
            self.assertTrue(self.container.start_unconfirmed)

    def test_while_its_end_is_recorded_it_is_not_started_again(self) -> None:
        self.fails(Unavailable("cut"))
        on_disk = self.hold_records()
        self.agent.become(self.made, cri.CONTAINER_EXITED, finished_at=7, reason="ContainerCannotRun")
        refused = self.failureResultOf(self.start_it(), FailedPrecondition)
        self.assertIn("is being stopped", str(refused.value))
        on_disk.callback(None)
        self.assertIs(self.container.state, EXITED)

    def test_while_one_of_two_stops_is_under_way_it_is_not_started_again(self) -> None:
        self.fails(Unavailable("cut"))
        first, second = self.hold("stop"), self.hold("stop")
        stops = [start(self.world.containers.stop(self.made, 1)) for _ in range(2)]
        self.assertEqual(self.container.stops, 2)
        refused = self.failureResultOf(self.start_it(), FailedPrecondition)
        self.assertIn("is being stopped", str(refused.value))
        for held in (second, first):
            held.callback(None)
        for one in stops:
            self.successResultOf(one)
        self.assertEqual(self.container.stops, 0)

    def test_one_that_did_run_and_is_refused_then_is_told_to_have_run(self) -> None:
        self.fails(Unavailable("cut"))
        told: list[ContainerState] = []
        self.patch(self.container.events, "container_changed", lambda one, _, after: told.append(after))
        self.agent.streams.clear()
        self.hold("stop").callback(self.ran(exit_code=5))
        self.fails(FailedPrecondition("it has run before"))
        self.assertEqual(told, [ContainerState.RUNNING, EXITED])


class RefusedTests(StartCase):
    """The agent could not run it."""

    def setUp(self) -> None:
        super().setUp()
        self.collected: list[str] = []

        async def collect(container: Container) -> str:
            self.collected.append(container.id)
            return ""

        self.patch(self.world.carried, "collect", collect)

    def test_what_one_wrote_that_ran_for_a_moment_is_brought_before_its_end_is_told(self) -> None:
        self.hold("stop").callback(self.ran(exit_code=137))
        self.world.logs.slow = Deferred()
        self.hold().callback(InvalidArgument("its limits can't be had"))
        call = self.start_it()
        self.assertEqual((self.collected, self.kept(self.made).state), ([self.made], ContainerState.STARTING))
        self.world.logs.slow.callback(None)
        self.failureResultOf(call, InvalidArgument)
        self.assertEqual((self.kept(self.made).state, self.kept(self.made).exit_code), (EXITED, 137))

    def test_one_that_never_ran_has_written_nothing(self) -> None:
        never = self.ran()
        never.reason, never.exit_code = "ContainerCannotRun", 127
        self.hold("stop").callback(never)
        on_disk = self.hold_records()
        self.hold().callback(InvalidArgument("no such file"))
        call = self.start_it()
        on_disk.callback(None)
        self.failureResultOf(call, InvalidArgument)
        self.assertEqual(self.collected, [])
        self.assertEqual((self.kept(self.made).state, self.kept(self.made).exit_code), (EXITED, 127))
