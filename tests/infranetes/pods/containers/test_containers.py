# SPDX-License-Identifier: Apache-2.0
"""Running, stopping and removing containers."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.internet.defer import Deferred

from infranetes.cri.validate import FOREVER
from infranetes.machines.agent.limits import PURGES
from infranetes.pods.containers.containers import MAX_EXEC_OUTPUT
from infranetes.pods.containers.stop import STOP_DRAIN_SECONDS
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Container
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.pods.vm import listing
from infranetes.pods.vm.reports import LOG_SECONDS
from infranetes.providers.interface import InstanceState
from infranetes_common.concurrency import start
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.wire import cri, vmserver
from tests.infranetes.cri.support import NO_CALL
from tests.infranetes.pods.case import ContainersTestCase
from tests.infranetes.pods.fakes import box


class LifeTests(ContainersTestCase):
    """StartContainer, StopContainer and RemoveContainer."""

    def test_starting_runs_it_and_begins_its_log(self) -> None:
        made = self.run_container()
        self.assertEqual((self.kept(made).state, self.kept(made).started_at), (ContainerState.RUNNING, 6))
        self.assertIn(made, self.world.logs.ensured)

    def test_a_start_is_told_once_the_logs_file_is_there(self) -> None:
        made = self.create()
        self.world.logs.opening = Deferred()
        starting = start(self.world.containers.start(made))
        self.assertNoResult(starting)
        self.assertEqual(self.kept(made).state, ContainerState.RUNNING)
        self.world.logs.opening.callback(None)
        self.successResultOf(starting)

    def test_what_runs_or_has_ended_does_not_start_again(self) -> None:
        made = self.run_container()
        for words in ("is running already", "has ended, and runs once: create another attempt"):
            failure = self.failureResultOf(start(self.world.containers.start(made)), FailedPrecondition)
            self.assertIn(words, str(failure.value))
            self.do(self.world.containers.stop(made, 0))

    def test_a_grace_period_is_as_long_as_kubernetes_likes_and_less_than_none_is_none(self) -> None:
        for asked, given in ((30 * 86400, 30 * 86400), (2**63 - 1, FOREVER), (-1, 0)):
            made = self.run_container(box(f"of {asked}"))
            request = cri.StopContainerRequest(container_id=made, timeout=asked)
            self.do(self.world.container_calls.StopContainer(request, NO_CALL))
            self.assertIn((f"stop {given}", made), self.agent.calls)

    def test_what_is_being_started_is_not_started_again(self) -> None:
        made = self.create()
        real = self.agent.start
        held: Deferred[None] = Deferred()

        async def start_held(id: str) -> Any:
            await held
            return await real(id)

        self.agent.start = start_held  # type: ignore[method-assign]
        first = start(self.world.containers.start(made))
        again = start(self.world.containers.start(made))
        self.assertIn("is being started already", str(self.failureResultOf(again, FailedPrecondition).value))
        removing = start(self.world.containers.remove(made))
        self.assertNoResult(removing)
        again = start(self.world.containers.start(made))
        self.assertIn("is being removed", str(self.failureResultOf(again, FailedPrecondition).value))
        held.callback(None)
        self.successResultOf(first)
        self.successResultOf(removing)

    def test_one_whose_start_is_refused_has_ended_and_never_ran(self) -> None:
        made = self.create()

        async def start_held(id: str) -> Any:
            raise ResourceExhausted("no process can be had")

        self.agent.start = start_held  # type: ignore[method-assign]
        self.agent.stop = self.stop_created  # type: ignore[method-assign]
        self.failureResultOf(start(self.world.containers.start(made)), ResourceExhausted)
        record = self.kept(made)
        self.assertEqual(
            (record.state, record.exit_code, record.reason, record.message),
            (ContainerState.EXITED, 128, "StartError", "no process can be had"),
        )
        self.assertEqual(record.started_at, record.finished_at)

    def test_one_whose_log_can_not_be_made_is_not_started_and_says_so(self) -> None:
        made = self.create()
        starts: list[str] = []

        async def start_noted(id: str) -> Any:
            starts.append(id)
            raise Unavailable("the connection is lost")

        self.patch(self.agent, "start", start_noted)
        self.patch(self.agent, "stop", self.stop_created)
        self.world.logs.refusal = FailedPrecondition("the log /l/0.log can't be made: Not a directory")
        failure = self.failureResultOf(start(self.world.containers.start(made)), FailedPrecondition)
        self.assertEqual(str(failure.value), "the log /l/0.log can't be made: Not a directory")
        record = self.kept(made)
        self.assertEqual((record.state, record.exit_code), (ContainerState.EXITED, 128))
        self.assertEqual((record.reason, record.message), ("StartError", str(failure.value)))
        self.assertEqual(starts, [])

    def test_one_that_may_run_already_is_not_ended_for_its_log(self) -> None:
        made = self.create()
        begin = self.agent.start

        async def lose(id: str) -> Any:
            raise Unavailable("the connection is lost")

        self.patch(self.agent, "start", lose)
        self.failureResultOf(start(self.world.containers.start(made)), Unavailable)
        self.patch(self.agent, "start", begin)
        self.world.logs.refusal = FailedPrecondition("the log /l/0.log can't be made: Not a directory")
        self.do(self.world.containers.start(made))
        self.assertEqual(self.kept(made).state, ContainerState.RUNNING)
        self.assertEqual(self.world.logs.prepared, [made])

    def refused(self, made: str, stopped: Any) -> Any:
        """Have the agent refuse a start, and answer the stop that follows so. Return the record."""

        async def refuse(id: str) -> Any:
            raise FailedPrecondition("it has run before")

        async def stop(id: str, grace_seconds: int, within: float = 30.0) -> Any:
            if isinstance(stopped, Exception):
                raise stopped
            return stopped

        self.patch(self.agent, "start", refuse)
        self.patch(self.agent, "stop", stop)
        self.failureResultOf(start(self.world.containers.start(made)), FailedPrecondition)
        return self.kept(made)

    def test_what_is_known_of_one_whose_start_is_refused_is_what_its_stop_says(self) -> None:
        ran = vmserver.ContainerState(state=cri.CONTAINER_EXITED, started_at=6, finished_at=7, exit_code=5)
        for number, (stopped, state, code) in enumerate(
            (
                (NotFound("no such container"), ContainerState.EXITED, 137),
                (Unavailable("the connection is lost"), ContainerState.STARTING, 0),
                (ran, ContainerState.EXITED, 5),
            )
        ):
            record = self.refused(self.create(box(f"c{number}")), stopped)
            self.assertEqual((record.state, record.exit_code), (state, code))

    def test_one_that_was_run_by_a_start_whose_answer_was_lost_has_ended_as_it_did(self) -> None:
        made = self.create()

        async def lose(id: str) -> Any:
            raise Unavailable("the connection is lost")

        patched = self.patch(self.agent, "start", lose)
        self.failureResultOf(start(self.world.containers.start(made)), Unavailable)
        patched.restore()
        ran = vmserver.ContainerState(state=cri.CONTAINER_EXITED, started_at=6, finished_at=7, exit_code=5)
        record = self.refused(made, ran)
        self.assertEqual((record.state, record.exit_code, record.started_at), (ContainerState.EXITED, 5, 6))
        self.assertEqual(record.reason, "Error")

    async def stop_created(self, id: str, grace_seconds: int, within: float = 30.0) -> Any:
        """Report the end of a container that never ran, as an agent does."""
        return self.agent.containers[id]

    def test_one_whose_start_was_lost_is_unknown_until_its_agent_says_more(self) -> None:
        made = self.create()
        real = self.agent.start

        async def start_held(id: str) -> Any:
            raise Unavailable("the connection is lost")

        self.agent.start = start_held  # type: ignore[method-assign]
        self.failureResultOf(start(self.world.containers.start(made)), Unavailable)
        container = self.world.node.inventory.containers[made]
        self.assertEqual(listing.shown_state(container), cri.CONTAINER_UNKNOWN)
        self.agent.become(made, cri.CONTAINER_CREATED)
        self.assertEqual(listing.shown_state(container), cri.CONTAINER_UNKNOWN)
        self.agent.start = real  # type: ignore[method-assign]
        self.do(self.world.containers.start(made))
        self.assertEqual(listing.shown_state(container), cri.CONTAINER_RUNNING)

    def test_it_is_shown_as_created_until_its_start_is_answered_and_as_unknown_if_that_is_lost(self) -> None:
        made = self.create()
        container = self.world.node.inventory.container(made)
        answer: Deferred[None] = Deferred()

        async def start_held(id: str) -> Any:
            await answer
            raise Unavailable("the connection is lost")

        self.patch(self.agent, "start", start_held)
        starting = start(self.world.containers.start(made))
        self.assertEqual(listing.shown_state(container), cri.CONTAINER_CREATED)
        answer.callback(None)
        self.failureResultOf(starting, Unavailable)
        self.assertEqual(listing.shown_state(container), cri.CONTAINER_UNKNOWN)

    def test_one_whose_start_was_lost_is_ended_by_a_stop(self) -> None:
        made = self.create()

        async def start_held(id: str) -> Any:
            raise Unavailable("the connection is lost")

        self.agent.start = start_held  # type: ignore[method-assign]
        self.agent.stop = self.stop_created  # type: ignore[method-assign]
        self.failureResultOf(start(self.world.containers.start(made)), Unavailable)
        self.do(self.world.containers.stop(made, 0))
        record = self.kept(made)
        self.assertEqual((record.state, record.reason), (ContainerState.EXITED, "StartError"))
        self.assertEqual(record.message, "it was stopped before it was run")

    def test_no_start_is_asked_for_when_it_can_not_be_recorded(self) -> None:
        made = self.create()
        self.world.node.inventory.container(made).record = attrs.evolve(self.kept(made), claimed=True)
        self.world.store.failing = ResourceExhausted("full")
        self.failureResultOf(start(self.world.containers.start(made)), ResourceExhausted)
        self.assertEqual(self.agent.containers[made].state, cri.CONTAINER_CREATED)
        self.world.store.failing = None
        self.do(self.world.containers.start(made))

    def test_its_own_end_is_told_once_its_log_is_complete(self) -> None:
        made = self.run_container()
        self.world.logs.slow = Deferred()
        self.agent.become(made, cri.CONTAINER_EXITED, finished_at=9)
        self.world.clock.advance(LOG_SECONDS - 1)
        self.assertEqual(self.kept(made).state, ContainerState.RUNNING)
        self.world.logs.slow.callback(None)
        self.assertEqual((self.kept(made).state, self.kept(made).finished_at), (ContainerState.EXITED, 9))

    def test_its_own_end_is_what_its_agent_said_though_the_vm_ends_before_it_is_told(self) -> None:
        made = self.run_container()
        self.world.logs.slow = Deferred()
        self.agent.become(made, cri.CONTAINER_EXITED, finished_at=9, exit_code=3, reason="Error")
        (instance,) = self.world.provider.instances.values()
        self.world.provider.ended(attrs.evolve(instance, state=InstanceState.ENDED, detail="gone"))
        kept = self.kept(made)
        self.assertEqual((kept.state, kept.exit_code, kept.finished_at), (ContainerState.EXITED, 3, 9))

    def test_its_own_end_does_not_wait_for_ever_for_its_log(self) -> None:
        made = self.run_container()
        self.world.logs.slow = Deferred()
        self.agent.become(made, cri.CONTAINER_EXITED, finished_at=9)
        self.world.clock.advance(LOG_SECONDS + 1)
        self.assertEqual((self.kept(made).state, self.kept(made).finished_at), (ContainerState.EXITED, 9))

    def test_its_own_end_is_recorded_as_the_agent_tells_it(self) -> None:
        made = self.run_container()
        self.agent.become(
            made, cri.CONTAINER_EXITED, finished_at=9, exit_code=42, reason="Error", message="oh"
        )
        record = self.kept(made)
        self.assertEqual(record.state, ContainerState.EXITED)
        self.assertEqual(
            (record.exit_code, record.reason, record.message, record.finished_at), (42, "Error", "oh", 9)
        )

    def test_an_old_word_of_the_agent_changes_nothing(self) -> None:
        made = self.run_container()
        self.do(self.world.containers.stop(made, 0))
        self.agent.become(made, cri.CONTAINER_RUNNING)
        self.assertEqual(self.kept(made).state, ContainerState.EXITED)

    def test_stopping_gives_it_its_time(self) -> None:
        made = self.run_container()
        self.do(self.world.containers.stop(made, 7))
        self.assertIn(("stop 7", made), self.agent.calls)
        self.assertEqual(self.kept(made).exit_code, 143)
        self.do(self.world.containers.stop(made, 7))
        self.assertEqual([call for call, _ in self.agent.calls].count("stop 7"), 1)

    def test_stopping_what_is_unknown_or_never_ran_is_nothing_to_do(self) -> None:
        self.do(self.world.containers.stop("f" * 32, 0))
        made = self.create()
        self.do(self.world.containers.stop(made, 0))
        self.assertEqual(self.kept(made).state, ContainerState.CREATED)

    def test_a_caller_that_goes_away_does_not_keep_a_container_alive(self) -> None:
        made = self.run_container()
        held: Deferred[Any] = Deferred()
        real = self.agent.stop

        async def stop(*arguments: Any) -> Any:
            await held
            return await real(*arguments)

        self.agent.stop = stop  # type: ignore[method-assign,assignment]
        call = start(self.world.containers.stop(made, 30))
        call.cancel()
        self.failureResultOf(call)
        held.callback(None)
        self.assertEqual(self.kept(made).state, ContainerState.EXITED)

    def test_an_unreachable_agent_is_said(self) -> None:
        made = self.run_container()
        self.agent.go_away()
        stop = start(self.world.containers.stop(made, 0))
        self.world.wait(3)
        self.failureResultOf(stop, Unavailable)
        self.failureResultOf(start(self.world.containers.exec_sync(made, ["ls"], 0, None)), Unavailable)
        self.assertEqual(self.kept(made).state, ContainerState.RUNNING)

    def test_removing_ends_it_writes_its_log_and_leaves_nothing(self) -> None:
        made = self.run_container()
        self.do(self.world.containers.remove(made))
        self.assertEqual(self.agent.containers, {})
        self.assertEqual(self.world.store.contents().containers, ())
        self.assertIn(made, self.world.logs.aborted)
        self.do(self.world.containers.remove(made))

    def test_one_that_is_being_stopped_is_not_started(self) -> None:
        made = self.run_container()
        other = self.create(box("other"))
        held: Deferred[None] = Deferred()
        real = self.agent.stop

        async def stop(*arguments: Any) -> Any:
            await held
            return await real(*arguments)

        self.agent.stop = stop  # type: ignore[method-assign,assignment]
        stopping = start(self.world.containers.stop(made, 30))
        refused = self.failureResultOf(start(self.world.containers.start(made)), FailedPrecondition)
        self.assertIn("is being stopped: create another attempt", str(refused.value))
        self.do(self.world.containers.start(other))
        held.callback(None)
        self.successResultOf(stopping)

    def test_the_log_of_one_that_has_ended_is_waited_for_by_its_stop_and_its_removal(self) -> None:
        made = self.run_container()
        self.agent.become(made, cri.CONTAINER_EXITED)
        for work, patience in (
            (self.world.containers.stop(made, 0), STOP_DRAIN_SECONDS),
            (self.world.containers.remove(made), self.world.times.drain),
        ):
            self.world.logs.slow = Deferred()
            waiting = start(work)
            self.world.clock.advance(patience - 0.1)
            self.assertNoResult(waiting)
            self.world.clock.advance(0.2)
            self.successResultOf(waiting)

    def test_removing_waits_for_the_log_but_not_for_ever(self) -> None:
        made = self.run_container()
        self.world.logs.slow = Deferred()
        remove = start(self.world.containers.remove(made))
        self.assertNoResult(remove)
        self.assertIn(made, self.agent.containers)
        self.world.wait(self.world.times.drain + 3)
        self.successResultOf(remove)

    def test_a_removal_that_the_agent_did_not_hear_is_finished_by_the_next(self) -> None:
        made = self.create()
        self.agent.away = True
        self.failureResultOf(start(self.world.containers.remove(made)), Unavailable)
        self.assertEqual(self.kept(made).state, ContainerState.REMOVING)
        self.agent.away = False
        self.do(self.world.containers.remove(made))
        self.assertEqual(self.world.store.contents().containers, ())

    def test_one_that_is_being_created_is_not_there_yet_and_its_removal_ends_that(self) -> None:
        class Feature(PodFeature):
            name = "one that takes its time"

            async def before_create(self, container: Container) -> None:
                await Deferred()

        self.world.join(Feature())
        creating = self.start_create(box("late"))
        (id,) = self.world.node.inventory.containers
        self.assertRaises(NotFound, self.world.containers.lookup, id)
        self.do(self.world.containers.remove(id))
        self.failureResultOf(creating, Unavailable)
        self.assertNotIn(("remove", id), self.agent.calls, "its agent was not asked for anything")
        self.assertEqual(self.world.store.contents().containers, ())

    def test_one_that_is_removed_while_its_sandbox_is_stopped_is_gone_after_that(self) -> None:
        made = self.run_container()
        self.world.logs.slow = Deferred()
        stopping = start(self.world.sandboxes.stop(self.sandbox))
        removing = start(self.world.containers.remove(made))
        self.assertNoResult(removing)
        self.world.logs.slow.callback(None)
        self.successResultOf(stopping)
        self.successResultOf(removing)
        self.assertEqual(self.world.store.contents().containers, ())

    def test_a_removal_frees_what_the_features_had_for_it(self) -> None:
        released: list[str] = []

        class Feature(PodFeature):
            name = "one that has something"

            async def release(self, container: Container) -> None:
                released.append(container.id)

        self.world.join(Feature())
        made = self.create()
        self.do(self.world.containers.remove(made))
        self.assertEqual(released, [made])

    def test_a_stop_that_failed_is_over(self) -> None:
        made = self.run_container()
        self.agent.away = True
        stopping = start(self.world.containers.stop(made, 0))
        self.world.wait(10)
        self.failureResultOf(stopping, Unavailable)
        self.assertEqual(self.world.node.inventory.containers[made].stops, 0)

    def test_containers_of_a_stopped_sandbox_need_no_agent_to_be_removed(self) -> None:
        made = self.run_container()
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.do(self.world.containers.remove(made))
        self.assertEqual(self.world.store.contents().containers, ())
        self.assertEqual(self.record(self.sandbox).state, SandboxState.STOPPED)

    def test_one_that_its_vm_lost_has_ended(self) -> None:
        made = self.run_container()
        self.do(self.agent.remove(made))  # without the daemon's knowledge
        record = self.kept(made)
        self.assertEqual((record.state, record.reason), (ContainerState.EXITED, "ContainerLost"))


class WhileItRunsTests(ContainersTestCase):
    """ExecSync, UpdateContainerResources, ReopenContainerLog."""

    def setUp(self) -> None:
        super().setUp()
        self.made = self.run_container()

    def test_what_a_command_wrote_is_on_the_node_before_its_end_is_told(self) -> None:
        brought: Deferred[None] = Deferred()
        asked: list[str] = []

        async def caught_up(container: Any) -> None:
            asked.append(container.id)
            await brought

        self.patch(self.world.carried, "caught_up", caught_up)
        call = start(self.world.containers.exec_sync(self.made, ["touch", "x"], 0, None))
        self.assertEqual(asked, [self.made])
        self.assertNoResult(call)
        brought.callback(None)
        self.successResultOf(call)

    def test_a_command_gives_what_it_gave(self) -> None:
        result = self.do(self.world.containers.exec_sync(self.made, ["ls", "-l"], 9, None))
        self.assertEqual((result.stdout, result.stderr, result.exit_code), (b"out", b"err", 3))
        self.assertIn(("exec ls -l 9 3600", self.made), self.agent.calls)

    def test_no_command_runs_longer_than_the_node_allows(self) -> None:
        most = self.world.times.exec_limit
        self.do(self.world.containers.exec_sync(self.made, ["ls"], 0, most + 100))
        self.assertIn((f"exec ls 0 {most:.0f}", self.made), self.agent.calls)

    def test_only_output_that_is_too_long_is_cut(self) -> None:
        for more, cut in ((0, False), (1, True)):
            output = vmserver.ExecSyncResponse(stdout=b"x" * (MAX_EXEC_OUTPUT + more), stderr=b"err")

            async def run(*_: Any, output: vmserver.ExecSyncResponse = output) -> vmserver.ExecSyncResponse:
                return output

            self.patch(self.agent, "exec_sync", run)
            result = self.do(self.world.containers.exec_sync(self.made, ["ls"], 0, None))
            self.assertEqual((len(result.stdout), result.stderr != b"err"), (MAX_EXEC_OUTPUT, cut))

    def test_without_a_timeout_the_calls_own_deadline_counts(self) -> None:
        self.do(self.world.containers.exec_sync(self.made, ["ls"], 0, 12.0))
        self.assertIn(("exec ls 0 12", self.made), self.agent.calls)

    def test_a_command_that_takes_too_long(self) -> None:
        self.agent.exec_error = DeadlineExceeded("no answer")
        call = start(self.world.containers.exec_sync(self.made, ["sleep"], 2, None))
        self.assertIn("longer than 2 s", str(self.failureResultOf(call, DeadlineExceeded).value))

    def test_no_command_in_what_does_not_run(self) -> None:
        self.do(self.world.containers.stop(self.made, 0))
        call = start(self.world.containers.exec_sync(self.made, ["ls"], 0, None))
        self.failureResultOf(call, FailedPrecondition)

    def test_new_limits_are_in_force(self) -> None:
        limits = cri.LinuxContainerResources(memory_limit_in_bytes=5)
        self.do(self.world.containers.update(self.made, limits))
        container = self.world.node.inventory.containers[self.made]
        self.assertEqual(container.reported.resources, limits)
        self.do(self.world.containers.stop(self.made, 0))
        self.failureResultOf(start(self.world.containers.update(self.made, limits)), FailedPrecondition)

    def test_a_log_is_reopened_while_it_runs(self) -> None:
        self.do(self.world.containers.reopen_log(self.made))
        self.assertEqual(self.world.logs.reopened, [self.made])
        self.do(self.world.containers.stop(self.made, 0))
        self.failureResultOf(start(self.world.containers.reopen_log(self.made)), FailedPrecondition)


class UnknownTests(ContainersTestCase):
    """Containers that the agent reports and that have no record."""

    def say(self, id: str) -> None:
        state = vmserver.ContainerState(id=id, state=cri.CONTAINER_RUNNING)
        self.agent.streams[-1].feed(vmserver.WatchEvent(container=state))

    def removals(self) -> list[str]:
        return [id for what, id in self.agent.calls if what == "remove"]

    def test_each_is_removed_once_and_no_more_than_some_at_a_time(self) -> None:
        held: list[Deferred[None]] = []

        async def remove(id: str, within: float = 30.0) -> None:
            self.agent.calls.append(("remove", id))
            held.append(Deferred())
            await held[-1]

        self.patch(self.agent, "remove", remove)
        for _ in range(3):
            for number in range(PURGES * 3):
                self.say(f"unknown{number}")
        self.assertEqual(self.removals(), [f"unknown{number}" for number in range(PURGES)])
        for one in held:
            one.callback(None)
        self.say("another")
        self.assertEqual(self.removals()[PURGES:], ["another"])
        held[-1].callback(None)

    def test_in_the_long_run_they_are_few(self) -> None:
        for number in range(PURGES * 40):
            self.say(f"unknown{number}")
        self.assertEqual(len(self.removals()), PURGES * 4)
        self.world.wait(5.0)
        self.say("later")
        self.assertEqual(self.removals()[-1], "later")

    def test_the_same_end_again_and_again_is_one(self) -> None:
        made = self.run_container()
        (container,) = self.world.node.inventory.sandboxes[self.sandbox].containers.values()
        waiting: Deferred[str] = Deferred()
        self.patch(self.world.carried, "collect", lambda _: waiting)
        for _ in range(100):
            state = vmserver.ContainerState(id=made, state=cri.CONTAINER_EXITED, exit_code=3)
            self.agent.streams[-1].feed(vmserver.WatchEvent(container=state))
        assert container.collecting is not None
        self.assertEqual(container.collecting.waiters, 1)
        waiting.callback("")
        self.world.wait(20.0)
        self.assertEqual((self.kept(made).state, self.kept(made).exit_code), (ContainerState.EXITED, 3))
