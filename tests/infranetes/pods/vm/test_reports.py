# SPDX-License-Identifier: Apache-2.0
"""What an agent reports of a container is what its record says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.logger import capturedLogs, formatEvent

from infranetes.pods.node.events import EventType
from infranetes.pods.store.states import ContainerState
from infranetes.pods.vm.reports import KILLED, LACKING, LOG_SECONDS, hold_report
from infranetes_common.concurrency import start
from infranetes_common.errors import ResourceExhausted, Unavailable
from infranetes_common.wire import cri, vmserver
from tests.infranetes.pods.case import ContainersTestCase
from tests.infranetes.pods.fakes import box


class EndTests(ContainersTestCase):
    """What is recorded of a container's end."""

    def setUp(self) -> None:
        super().setUp()
        self.made = self.run_container(box("first"))

    @property
    def container(self) -> Any:
        return self.world.node.inventory.containers[self.made]

    def ended(self, **fields: Any) -> Any:
        """Let a container end so, and return its record."""
        made = self.run_container()
        self.agent.become(made, cri.CONTAINER_EXITED, **fields)
        record = self.kept(made)
        self.assertIs(record.state, ContainerState.EXITED)
        self.do(self.world.containers.remove(made))
        return record

    def test_its_reason_is_the_agents_or_follows_from_its_exit_code(self) -> None:
        for said, code, reason in (
            ("OOMKilled", 137, "OOMKilled"),
            ("", 0, "Completed"),
            ("", 1, "Error"),
            ("Error", 2, "Error"),
            ("Completed", 0, "Completed"),
        ):
            record = self.ended(reason=said, exit_code=code)
            self.assertEqual((record.reason, record.exit_code), (reason, code))

    def test_writes_that_did_not_reach_the_node_are_its_reason_unless_it_has_a_worse_one(self) -> None:
        self.patch(self.world.carried, "collect", lambda _: succeed("2 files were not written"))
        record = self.ended(reason="Completed", message="done")
        self.assertEqual(
            (record.reason, record.message), ("VolumesNotWritten", "done; 2 files were not written")
        )
        record = self.ended(reason="OOMKilled")
        self.assertEqual((record.reason, record.message), ("OOMKilled", "2 files were not written"))

    def test_its_times_are_the_agents_and_never_in_the_wrong_order(self) -> None:
        now = self.world.now()
        for said, expected in (
            ({"started_at": 6, "finished_at": 9}, (6, 9)),
            ({"started_at": 6, "finished_at": 5}, (6, 6)),
            ({"started_at": 6, "finished_at": 0}, (6, now)),
        ):
            record = self.ended(**said)
            self.assertEqual((record.started_at, record.finished_at), expected)

    def test_what_is_recorded_of_its_start_stays(self) -> None:
        """Also if an agent that has started anew says something else of it."""
        made = self.run_container()
        started = self.kept(made).started_at
        self.agent.become(made, cri.CONTAINER_EXITED, started_at=started + 7, finished_at=started + 9)
        record = self.kept(made)
        self.assertEqual((record.started_at, record.finished_at), (started, started + 9))

    def test_a_start_without_a_time_is_now(self) -> None:
        made = self.create(box("b"))
        self.agent.become(made, cri.CONTAINER_RUNNING, started_at=0)
        self.assertEqual(self.kept(made).started_at, self.world.now())
        self.agent.become(made, cri.CONTAINER_RUNNING, started_at=8)
        self.assertEqual(self.kept(made).started_at, self.world.now(), "it started once")

    def test_one_that_never_ran_was_not_started_and_has_no_output_to_wait_for(self) -> None:
        events: list[EventType] = []
        self.world.logs.slow = Deferred()
        for reason in ("ContainerCannotRun", "StartError"):
            made = self.create(box(reason))
            self.world.node.inventory.events.listen(lambda event, sandbox, container: events.append(event))
            self.agent.become(made, cri.CONTAINER_EXITED, reason=reason, exit_code=127)
            record = self.kept(made)
            self.assertEqual((record.state, record.reason), (ContainerState.EXITED, reason))
            self.assertNotIn(EventType.STARTED, events)

    def test_its_log_and_its_volumes_are_brought_once_before_its_end_is_told(self) -> None:
        done: list[str] = []
        flushed: Deferred[str] = Deferred()

        def collect(_: Any) -> Deferred[str]:
            done.append("volumes")
            return flushed

        def drain(_: Any) -> Deferred[None]:
            done.append("log")
            return succeed(None)

        self.patch(self.world.carried, "collect", collect)
        self.patch(self.world.logs, "drain", drain)
        for _ in range(2):
            self.agent.become(self.made, cri.CONTAINER_EXITED, finished_at=9)
        self.assertEqual((done, self.kept(self.made).state), (["volumes"], ContainerState.RUNNING))
        flushed.callback("")
        self.assertEqual((done, self.kept(self.made).state), (["volumes", "log"], ContainerState.EXITED))

    def test_an_end_that_can_not_be_recorded_is_in_the_log(self) -> None:
        self.world.store.failing = ResourceExhausted("the disk is full")
        with capturedLogs() as events:
            self.agent.become(self.made, cri.CONTAINER_EXITED, finished_at=9)
        words = " ".join(formatEvent(event) or "" for event in events)
        self.assertIn(f"the end of container {self.made} was not recorded", words)
        self.assertIn("the disk is full", words)

    def test_an_end_that_can_not_be_recorded_is_an_end_all_the_same(self) -> None:
        self.world.store.failing = ResourceExhausted("full")
        self.agent.become(self.made, cri.CONTAINER_EXITED, finished_at=9)
        self.world.store.failing = None
        self.assertIs(self.container.state, ContainerState.EXITED)

    def test_a_stop_waits_a_moment_for_the_log_and_an_own_end_longer(self) -> None:
        self.world.logs.slow = Deferred()
        stopped = start(self.world.containers.stop(self.made, 5))
        self.world.clock.advance(1.9)
        self.assertNoResult(stopped)
        self.assertIs(self.container.state, ContainerState.RUNNING)
        self.world.clock.advance(0.2)
        self.successResultOf(stopped)
        self.assertEqual((self.container.state, self.kept(self.made).exit_code), (ContainerState.EXITED, 143))
        self.world.logs.slow = Deferred()
        own = self.run_container()
        self.agent.become(own, cri.CONTAINER_EXITED)
        self.world.clock.advance(LOG_SECONDS - 0.1)
        self.assertIs(self.kept(own).state, ContainerState.RUNNING)
        self.world.clock.advance(0.2)
        self.assertIs(self.kept(own).state, ContainerState.EXITED)

    def pumped(self, container: Any, said: list[str]) -> Any:
        """Give the container a log that a test lets advance. :param said: gets its lines of our own."""
        log = SimpleNamespace(progress=0, lacking=False)
        container.pump = SimpleNamespace(log=log, say=said.append)
        return log

    def test_a_log_that_advances_is_waited_for_and_what_is_told_before_it_says_so(self) -> None:
        said: list[str] = []
        log = self.pumped(self.container, said)
        self.world.logs.slow = Deferred()
        stopped = start(self.world.containers.stop(self.made, 5, 60.0))
        for _ in range(58):
            self.world.clock.advance(1)
            log.progress += 1
            self.assertNoResult(stopped)
        self.assertIs(self.container.state, ContainerState.RUNNING)
        self.assertEqual(said, [])
        self.world.clock.advance(2.1)
        self.successResultOf(stopped)
        record = self.kept(self.made)
        self.assertIn("its log is not complete", record.message)
        self.assertEqual(said, ["the container's end is told before its log was read to its end"])
        own = self.run_container()
        made = self.world.node.inventory.containers[own]
        log = self.pumped(made, said)
        self.world.logs.slow = Deferred()
        self.agent.become(own, cri.CONTAINER_EXITED, message="done")
        for _ in range(10):
            self.world.clock.advance(LOG_SECONDS - 1)
            log.progress += 1
            self.assertIs(self.kept(own).state, ContainerState.RUNNING)
        log.lacking = True
        self.world.logs.slow.callback(None)
        record = self.kept(own)
        self.assertEqual((record.state, record.message), (ContainerState.EXITED, f"done; {LACKING}"))

    def test_what_its_vm_took_with_it_is_killed_and_says_what_may_be_missing(self) -> None:
        created = self.create(box("created"))
        self.patch(self.world.carried, "unwritten", lambda _: "the last writes may be missing")
        self.world.clock.advance(5)
        self.world.provider.end(self.record(self.sandbox).instance_id, "power")
        for id, missing in ((self.made, "; the last writes may be missing"), (created, "")):
            record = self.kept(id)
            self.assertEqual(
                (record.state, record.exit_code, record.reason, record.finished_at),
                (ContainerState.EXITED, KILLED, "VMEnded", self.world.now()),
            )
            self.assertEqual(record.message, f"the VM ended by itself: power{missing}")

    def test_a_report_that_comes_after_its_removal_began_changes_nothing(self) -> None:
        async def refuse(id: str, within: float = 30.0) -> None:
            raise Unavailable("lost")

        self.patch(self.agent, "remove", refuse)
        self.failureResultOf(start(self.world.containers.remove(self.made)), Unavailable)
        self.agent.become(self.made, cri.CONTAINER_EXITED, exit_code=9)
        record = self.kept(self.made)
        self.assertEqual((record.state, record.exit_code), (ContainerState.REMOVING, 143))


class HeldTests(ContainersTestCase):
    """Reports that come while a container is being started."""

    def test_of_several_the_latest_state_counts_and_of_one_state_the_last(self) -> None:
        container = self.world.node.inventory.containers[self.create()]

        def held(state: cri.ContainerState, code: int) -> tuple[int, int]:
            hold_report(container, vmserver.ContainerState(state=state, exit_code=code))
            report = container.held_report
            assert report is not None
            return report.state, report.exit_code

        unknown, running, exited = cri.CONTAINER_UNKNOWN, cri.CONTAINER_RUNNING, cri.CONTAINER_EXITED
        self.assertEqual(held(unknown, 0), (unknown, 0))
        self.assertEqual(held(running, 0), (running, 0))
        self.assertEqual(held(cri.CONTAINER_CREATED, 0), (running, 0))
        self.assertEqual(held(exited, 1), (exited, 1))
        self.assertEqual(held(exited, 2), (exited, 2))
        self.assertEqual(held(running, 0), (exited, 2))

    def test_one_that_ends_before_its_start_is_answered_has_run_and_ended(self) -> None:
        made = self.create()
        real = self.agent.start

        async def ends_first(id: str) -> Any:
            report = await real(id)
            self.agent.become(id, cri.CONTAINER_EXITED, exit_code=4, finished_at=9)
            self.assertIs(self.kept(made).state, ContainerState.STARTING)
            return vmserver.ContainerState(id=id, state=cri.CONTAINER_RUNNING, started_at=report.started_at)

        self.patch(self.agent, "start", ends_first)
        self.do(self.world.containers.start(made))
        record = self.kept(made)
        self.assertEqual((record.state, record.exit_code, record.started_at), (ContainerState.EXITED, 4, 6))
