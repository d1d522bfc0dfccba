# SPDX-License-Identifier: Apache-2.0
"""StopContainer and RemoveContainer when something is lost, fails, or happens second."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import attrs
from twisted.internet.defer import Deferred

from infranetes.pods.containers.containers import MAX_EXEC_OUTPUT
from infranetes.pods.containers.stop import LOOK_PAUSE_SECONDS, STOP_DRAIN_SECONDS
from infranetes.pods.store.states import ContainerState
from infranetes.providers.interface import Instance, InstanceState
from infranetes_common.concurrency import start
from infranetes_common.errors import DeadlineExceeded, NotFound, ResourceExhausted, Unavailable
from infranetes_common.wire import cri, vmserver
from tests.infranetes.pods.case import ContainersTestCase

EXITED = ContainerState.EXITED


class StopCase(ContainersTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.made = self.run_container()

    def stop(self, limit: float | None = None) -> Deferred[None]:
        return start(self.world.containers.stop(self.made, 1, limit))

    def remove(self) -> Deferred[None]:
        return start(self.world.containers.remove(self.made))

    def answer(self, name: str, error: Exception) -> None:
        """Have the agent fail so."""

        async def fails(*_: Any, **__: Any) -> Any:
            raise error

        self.patch(self.agent, name, fails)


class StopTests(StopCase):
    def test_one_that_its_vm_does_not_know_has_ended(self) -> None:
        self.answer("stop", NotFound("no such container"))
        self.successResultOf(self.stop())
        self.assertEqual((self.kept(self.made).state, self.kept(self.made).reason), (EXITED, "ContainerLost"))

    def test_one_whose_vm_has_ended_with_the_agent_has_ended_though_that_is_told_late(self) -> None:
        (instance,) = self.world.provider.instances.values()
        looks: list[Instance | Exception] = [
            Unavailable("the cloud does not answer"),
            instance,
            attrs.evolve(instance, state=InstanceState.ENDED, detail="power"),
        ]
        times: list[float] = []

        async def get(instance_id: str) -> Instance:
            times.append(self.world.clock.seconds())
            found = looks.pop(0)
            if isinstance(found, Exception):
                raise found
            return found

        self.patch(self.world.provider, "get", lambda id: start(get(id)))
        self.answer("stop", Unavailable("the connection is lost"))
        stopping = self.stop()
        self.world.wait(2.0, LOOK_PAUSE_SECONDS)
        self.successResultOf(stopping)
        self.assertEqual((self.kept(self.made).state, self.kept(self.made).reason), (EXITED, "VMEnded"))
        self.assertEqual([time - times[0] for time in times], [0, LOOK_PAUSE_SECONDS, 2 * LOOK_PAUSE_SECONDS])

    def test_one_that_was_stopped_before_it_was_run_has_the_exit_code_of_one_that_could_not_be(self) -> None:
        container = self.world.node.inventory.containers[self.made]
        container.record = attrs.evolve(container.record, state=ContainerState.STARTING, started_at=0)
        self.agent.containers[self.made].state = cri.CONTAINER_CREATED
        self.agent.containers[self.made].started_at = 0

        async def never_ran(*_: Any) -> Any:
            return self.agent.containers[self.made]

        self.patch(self.agent, "stop", never_ran)
        self.successResultOf(self.stop())
        kept = self.kept(self.made)
        self.assertEqual((kept.state, kept.exit_code, kept.reason), (EXITED, 128, "StartError"))

    def test_a_log_that_advances_is_waited_for_as_long_as_the_caller_waits(self) -> None:
        for ended in (False, True):
            self.setUp()
            if ended:
                self.agent.become(self.made, cri.CONTAINER_EXITED)
            self.world.logs.slow = Deferred()
            log = SimpleNamespace(progress=0, lacking=False)
            container = self.world.node.inventory.containers[self.made]
            container.pump = cast(Any, SimpleNamespace(log=log, say=lambda text: None))
            stopping = self.stop(20.0)
            for _ in range(19):
                log.progress += 1
                self.world.clock.advance(1.0)
            self.assertNoResult(stopping)
            log.progress += 1
            self.world.clock.advance(STOP_DRAIN_SECONDS)
            self.successResultOf(stopping)


class RemovalTests(StopCase):
    def removals(self) -> int:
        return [call for call, _ in self.agent.calls].count("remove")

    def test_however_often_it_is_asked_for_at_once_the_agent_is_asked_once(self) -> None:
        held: Deferred[None] = Deferred()
        real = self.agent.remove

        async def slowly(id: str, within: float = 30.0) -> None:
            waiting: Deferred[None] = Deferred()
            held.addCallback(waiting.callback)
            await waiting
            await real(id)

        self.patch(self.agent, "remove", slowly)
        both = [self.remove() for _ in range(2)]
        held.callback(None)
        for one in both:
            self.successResultOf(one)
        self.assertEqual(self.removals(), 1)

    def test_one_that_runs_is_killed_without_grace(self) -> None:
        self.successResultOf(self.remove())
        self.assertIn(("stop 0", self.made), self.agent.calls)

    def test_nothing_is_removed_before_that_is_on_the_disk_also_the_second_time(self) -> None:
        self.do(self.world.containers.stop(self.made, 0))
        self.world.store.failing = ResourceExhausted("full")
        for _ in range(2):
            self.failureResultOf(self.remove(), ResourceExhausted)
            self.assertEqual(self.removals(), 0)
        self.world.store.failing = None
        seen: list[ContainerState] = []
        real = self.agent.remove

        async def look(id: str, within: float = 30.0) -> None:
            seen.append(self.kept(id).state)
            await real(id)

        self.patch(self.agent, "remove", look)
        self.successResultOf(self.remove())
        self.assertEqual(seen, [ContainerState.REMOVING])


class WhileItRunsTests(StopCase):
    """UpdateContainerResources and ExecSync."""

    LIMITS = cri.LinuxContainerResources(memory_limit_in_bytes=5)

    def test_limits_are_changed_though_the_caller_goes_away(self) -> None:
        held: Deferred[None] = Deferred()
        real = self.agent.update

        async def slowly(id: str, resources: Any) -> Any:
            await held
            return await real(id, resources)

        self.patch(self.agent, "update", slowly)
        updating = start(self.world.containers.update(self.made, self.LIMITS))
        updating.cancel()
        self.failureResultOf(updating)
        held.callback(None)
        self.assertEqual(self.agent.containers[self.made].resources, self.LIMITS)

    def test_what_the_agent_answers_is_known_though_its_events_are_not_heard(self) -> None:
        self.agent.streams.clear()
        self.do(self.world.containers.update(self.made, self.LIMITS))
        self.assertEqual(self.world.node.inventory.containers[self.made].limits, self.LIMITS)

    def run_command(self, **output: Any) -> tuple[vmserver.ExecSyncResponse, tuple[Any, ...]]:
        """Run a command with this output; return the answer, and what the agent was asked for."""
        asked: list[tuple[Any, ...]] = []

        async def run(*given: Any) -> vmserver.ExecSyncResponse:
            asked.append(given)
            return vmserver.ExecSyncResponse(**output)

        self.patch(self.agent, "exec_sync", run)
        answer = self.do(self.world.containers.exec_sync(self.made, ["ls"], 0, None))
        return answer, asked[0]

    def test_what_is_cut_of_a_commands_output_changes_nothing_else_of_it(self) -> None:
        answer, asked = self.run_command(stdout=b"x" * (MAX_EXEC_OUTPUT + 1), stderr=b"err", exit_code=7)
        self.assertEqual((answer.exit_code, answer.stderr[:4]), (7, b"err\n"))
        self.assertIn(b"stdout cut after", answer.stderr)
        self.assertEqual(asked[-1], MAX_EXEC_OUTPUT + 1, "one byte more, by which it is known to be cut")

    def test_one_that_took_longer_than_its_call_says_how_long_that_was(self) -> None:
        self.agent.exec_error = DeadlineExceeded("no answer")
        call = start(self.world.containers.exec_sync(self.made, ["sleep"], 0, 12.0))
        self.assertIn("longer than 12 s", str(self.failureResultOf(call, DeadlineExceeded).value))
