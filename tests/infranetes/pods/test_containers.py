"""Creating, running, stopping and removing containers."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.internet.defer import Deferred

from infranetes.pods.follow import LOG_SECONDS
from infranetes.pods.states import ContainerState, SandboxState
from infranetes.pods.waits import go
from infranetes.providers.interface import InstanceState
from infranetes_common import cri
from infranetes_common.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from tests.infranetes.pods.fakes import IMAGE, FakeImage, box
from tests.infranetes.pods.test_sandboxes import Base


class ContainerBase(Base):
    def setUp(self) -> None:
        super().setUp()
        self.sandbox = self.run_pod()
        self.agent = self.world.agents[self.sandbox]

    def start_create(self, config: Any = None) -> Deferred[str]:
        config = config or box()
        return go(self.world.containers.create(self.sandbox, config))

    def create(self, config: Any = None) -> str:
        return self.successResultOf(self.start_create(config))

    def run_container(self, config: Any = None) -> str:
        made = self.create(config)
        self.do(self.world.containers.start(made))
        return made

    def kept(self, container: str) -> Any:
        return next(one for one in self.world.store.contents().containers if one.id == container)


class CreateTests(ContainerBase):
    """CreateContainer."""

    def test_the_image_is_brought_once_then_the_container_is_made(self) -> None:
        made = self.create()
        self.assertEqual(self.agent.loads, [(IMAGE, f"{IMAGE} without 1".encode())])
        self.assertEqual(self.kept(made).state, ContainerState.CREATED)
        self.assertEqual(self.kept(made).image_id, IMAGE)
        self.create(box("second"))
        self.assertEqual(len(self.agent.loads), 1)

    def test_an_image_with_a_url_is_fetched_by_the_vm_itself(self) -> None:
        self.world.node.images.image = FakeImage(url="https://localhost/program")
        self.create()
        self.assertEqual(self.agent.loads, [(IMAGE, "https://localhost/program")])

    def test_creates_side_by_side_share_one_load(self) -> None:
        self.agent.holding = Deferred()
        creates = [self.start_create(box(f"c{number}")) for number in range(5)]
        self.agent.holding.callback(None)
        ids = {self.successResultOf(each) for each in creates}
        self.assertEqual(len(ids), 5)
        self.assertEqual(len(self.agent.loads), 1)

    def test_the_record_is_there_before_the_agent_is_asked(self) -> None:
        seen: list[Any] = []
        real = self.agent.create

        async def create(*arguments: Any) -> Any:
            seen.extend(self.world.store.contents().containers)
            return await real(*arguments)

        self.agent.create = create  # type: ignore[method-assign,assignment]
        made = self.create()
        self.assertEqual([(one.id, one.state) for one in seen], [(made, ContainerState.CREATING)])

    def test_one_that_fails_leaves_nothing(self) -> None:
        self.agent.create_error = InvalidArgument("config.working_dir: not a path")
        self.failureResultOf(self.start_create(), InvalidArgument)
        self.assertEqual(self.world.store.contents().containers, ())
        self.assertEqual(self.world.node.inventory.containers, {})
        self.assertEqual(self.agent.containers, {})
        self.agent.create_error = None
        self.create()

    def test_no_container_is_asked_for_when_the_record_can_not_be_written(self) -> None:
        self.world.store.failing = ResourceExhausted("full")
        self.failureResultOf(self.start_create(), ResourceExhausted)
        self.assertEqual(self.agent.calls, [])
        self.world.store.failing = None
        self.create()

    def test_an_agent_lost_in_the_middle_is_rid_of_it_when_it_is_back(self) -> None:
        self.agent.create_error = Unavailable("the connection is lost")
        real_remove = self.agent.remove

        async def lost(*_: Any, **__: Any) -> None:
            raise Unavailable("the connection is lost")

        self.agent.remove = lost  # type: ignore[method-assign]
        self.failureResultOf(self.start_create(), Unavailable)
        self.assertEqual(self.world.store.contents().containers, ())
        self.agent.remove = real_remove  # type: ignore[method-assign]
        self.agent.become("f" * 32, cri.CONTAINER_CREATED)  # it had done it all the same
        self.assertEqual(self.agent.containers, {})

    def test_an_image_that_is_not_on_the_node_is_said(self) -> None:
        error = self.failureResultOf(self.start_create(box(image="nginx")), NotFound).value
        self.assertIn("nginx", str(error))
        self.assertEqual(self.world.store.contents().containers, ())

    def test_an_unknown_sandbox_is_said(self) -> None:
        self.sandbox = "f" * 32
        self.failureResultOf(self.start_create(), NotFound)

    def test_a_stopped_sandbox_takes_no_container(self) -> None:
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.failureResultOf(self.start_create(), FailedPrecondition)

    def test_a_name_is_one_containers(self) -> None:
        self.create()
        self.failureResultOf(self.start_create(), AlreadyExists)
        self.create(box(attempt=1))

    def test_the_second_call_for_a_creation_under_way_joins_it(self) -> None:
        self.agent.holding = Deferred()
        first, second = self.start_create(), self.start_create()
        first.cancel()
        self.failureResultOf(first)
        self.agent.holding.callback(None)
        self.assertIn(self.successResultOf(second), self.agent.containers)

    def test_a_container_that_nobody_was_told_of_is_given_to_who_asks_again(self) -> None:
        self.agent.holding = Deferred()
        first = self.start_create()
        first.cancel()
        self.failureResultOf(first)
        self.agent.holding.callback(None)
        (container,) = self.world.node.inventory.containers
        self.assertEqual(self.create(), container)


class LifeTests(ContainerBase):
    """From its start to its end."""

    def test_starting_runs_it_and_begins_its_log(self) -> None:
        made = self.run_container()
        self.assertEqual((self.kept(made).state, self.kept(made).started_at), (ContainerState.RUNNING, 6))
        self.assertIn(made, self.world.logs.ensured)
        self.do(self.world.containers.start(made))

    def test_a_start_is_told_once_the_logs_file_is_there(self) -> None:
        made = self.create()
        self.world.logs.opening = Deferred()
        starting = go(self.world.containers.start(made))
        self.assertNoResult(starting)
        self.assertEqual(self.kept(made).state, ContainerState.RUNNING)
        self.world.logs.opening.callback(None)
        self.successResultOf(starting)

    def test_what_has_ended_does_not_start_again(self) -> None:
        made = self.run_container()
        self.do(self.world.containers.stop(made, 0))
        self.failureResultOf(go(self.world.containers.start(made)), FailedPrecondition)

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
        call = go(self.world.containers.stop(made, 30))
        call.cancel()
        self.failureResultOf(call)
        held.callback(None)
        self.assertEqual(self.kept(made).state, ContainerState.EXITED)

    def test_an_unreachable_agent_is_said(self) -> None:
        made = self.run_container()
        self.agent.go_away()
        stop = go(self.world.containers.stop(made, 0))
        self.world.wait(3)
        self.failureResultOf(stop, Unavailable)
        self.failureResultOf(go(self.world.containers.exec_sync(made, ["ls"], 0, None)), Unavailable)
        self.assertEqual(self.kept(made).state, ContainerState.RUNNING)

    def test_removing_ends_it_writes_its_log_and_leaves_nothing(self) -> None:
        made = self.run_container()
        self.do(self.world.containers.remove(made))
        self.assertEqual(self.agent.containers, {})
        self.assertEqual(self.world.store.contents().containers, ())
        self.assertIn(made, self.world.logs.aborted)
        self.do(self.world.containers.remove(made))

    def test_removing_waits_for_the_log_but_not_for_ever(self) -> None:
        made = self.run_container()
        self.world.logs.slow = Deferred()
        remove = go(self.world.containers.remove(made))
        self.assertNoResult(remove)
        self.assertIn(made, self.agent.containers)
        self.world.wait(self.world.times.drain + 3)
        self.successResultOf(remove)

    def test_a_removal_that_the_agent_did_not_hear_is_finished_by_the_next(self) -> None:
        made = self.create()
        self.agent.away = True
        self.failureResultOf(go(self.world.containers.remove(made)), Unavailable)
        self.assertEqual(self.kept(made).state, ContainerState.REMOVING)
        self.agent.away = False
        self.do(self.world.containers.remove(made))
        self.assertEqual(self.world.store.contents().containers, ())

    def test_containers_of_a_stopped_sandbox_need_no_agent_to_be_removed(self) -> None:
        made = self.run_container()
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.do(self.world.containers.remove(made))
        self.assertEqual(self.world.store.contents().containers, ())
        self.assertEqual(self.record(self.sandbox).state, SandboxState.STOPPED)

    def test_one_that_its_vm_lost_has_ended(self) -> None:
        made = self.run_container()
        self.do(self.agent.remove(made))  # behind our back
        record = self.kept(made)
        self.assertEqual((record.state, record.reason), (ContainerState.EXITED, "ContainerLost"))


class WhileItRunsTests(ContainerBase):
    """ExecSync, UpdateContainerResources, ReopenContainerLog."""

    def setUp(self) -> None:
        super().setUp()
        self.made = self.run_container()

    def test_a_command_gives_what_it_gave(self) -> None:
        result = self.do(self.world.containers.exec_sync(self.made, ["ls", "-l"], 9, None))
        self.assertEqual((result.stdout, result.stderr, result.exit_code), (b"out", b"err", 3))
        self.assertIn(("exec ls -l 9 3600", self.made), self.agent.calls)

    def test_without_a_timeout_the_calls_own_deadline_counts(self) -> None:
        self.do(self.world.containers.exec_sync(self.made, ["ls"], 0, 12.0))
        self.assertIn(("exec ls 0 12", self.made), self.agent.calls)

    def test_a_command_that_takes_too_long(self) -> None:
        self.agent.exec_error = DeadlineExceeded("no answer")
        call = go(self.world.containers.exec_sync(self.made, ["sleep"], 2, None))
        self.assertIn("longer than 2 s", str(self.failureResultOf(call, DeadlineExceeded).value))

    def test_no_command_in_what_does_not_run(self) -> None:
        self.do(self.world.containers.stop(self.made, 0))
        call = go(self.world.containers.exec_sync(self.made, ["ls"], 0, None))
        self.failureResultOf(call, FailedPrecondition)

    def test_new_limits_are_in_force(self) -> None:
        limits = cri.LinuxContainerResources(memory_limit_in_bytes=5)
        self.do(self.world.containers.update(self.made, limits))
        container = self.world.node.inventory.containers[self.made]
        self.assertEqual(container.seen.resources, limits)
        self.do(self.world.containers.stop(self.made, 0))
        self.failureResultOf(go(self.world.containers.update(self.made, limits)), FailedPrecondition)

    def test_a_log_is_reopened_while_it_runs(self) -> None:
        self.do(self.world.containers.reopen_log(self.made))
        self.assertEqual(self.world.logs.reopened, [self.made])
        self.do(self.world.containers.stop(self.made, 0))
        self.failureResultOf(go(self.world.containers.reopen_log(self.made)), FailedPrecondition)
