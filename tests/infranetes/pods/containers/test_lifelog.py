# SPDX-License-Identifier: Apache-2.0
"""The log's lines about containers: one for each event, with ids and names, without secrets."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import attrs
from twisted.logger import globalLogPublisher

from infranetes.cri.streaming import StreamingCalls
from infranetes.pods.containers.lifelog import MAX_PROGRAM, log_command, log_container_events
from infranetes.pods.store.states import ContainerState
from infranetes.pods.streams import Streams
from infranetes_common import logging
from infranetes_common.concurrency import sleep, start
from infranetes_common.errors import DeadlineExceeded, InvalidArgument
from infranetes_common.wire import cri
from tests.infranetes.cri.support import NO_CALL
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import box


class LifeLogTests(PodsTestCase):
    def setUp(self) -> None:
        super().setUp()
        log_container_events(self.world.node.inventory, self.world.clock)
        self.stream = io.StringIO()
        told = logging.observer("json", "info", self.stream)
        globalLogPublisher.addObserver(told)
        self.addCleanup(globalLogPublisher.removeObserver, told)

    def told_at(self, level: str) -> Callable[[], list[dict[str, Any]]]:
        """Collect the log's lines of this level. Return a function that returns those about commands."""
        stream = io.StringIO()
        told = logging.observer("json", level, stream)
        globalLogPublisher.addObserver(told)
        self.addCleanup(globalLogPublisher.removeObserver, told)
        return lambda: [
            one for one in map(json.loads, stream.getvalue().splitlines()) if "command" in one["message"]
        ]

    def lines(self) -> list[dict[str, Any]]:
        """The lines logged since the last call."""
        found = [json.loads(line) for line in self.stream.getvalue().splitlines()]
        self.stream.seek(0)
        self.stream.truncate()
        return found

    def line(self, words: str, **fields: Any) -> dict[str, Any]:
        """The only line since the last call that contains `words`."""
        found = [one for one in self.lines() if words in one["message"]]
        self.assertEqual(len(found), 1, words)
        self.assertEqual((found[0]["level"], found[0]["pod"]), ("info", "default/web"))
        self.assertIn("seconds", found[0]) if fields.pop("timed", True) else None
        for name, value in fields.items():
            self.assertEqual(found[0][name], value)
        return found[0]

    def test_the_life_of_a_pod(self) -> None:
        sandbox = self.run_pod()
        self.line("is ready", sandbox=sandbox)
        container = self.do(self.world.containers.create(sandbox, box()))
        ids = {"sandbox": sandbox, "container": container}
        self.line("container main of default/web is created", **ids)
        self.do(self.world.containers.start(container))
        self.line("container main of default/web runs", **ids)
        self.do(self.world.containers.exec_sync(container, ["cat", "--password=secret"], 0, None))
        self.assertEqual(self.lines(), [])  # probes do this every few seconds
        told = self.told_at("debug")
        self.do(self.world.containers.exec_sync(container, ["cat", "--password=secret"], 0, None))
        (found,) = told()
        self.assertEqual(found["message"], "command cat in container main of default/web ended: exit code 3")
        self.assertEqual(found["seconds"], 0.0)
        self.assertNotIn("secret", json.dumps(found))
        self.world.agents[sandbox].become(
            container, cri.CONTAINER_EXITED, finished_at=2_000_000_006, exit_code=137, reason="OOMKilled"
        )
        found = self.line("container main of default/web ended: exit code 137, OOMKilled", **ids)
        self.assertEqual(found["seconds"], 2.0)
        self.do(self.world.containers.remove(container))
        self.line("container main of default/web is removed", **ids)
        self.do(self.world.sandboxes.stop(sandbox))
        self.line("is stopped", sandbox=sandbox)
        self.do(self.world.sandboxes.remove(sandbox))
        self.line("is removed", sandbox=sandbox, timed=False)

    def notes(self, container: str) -> list[tuple[str, str]]:
        """Return what the timeline says of the container, and what failed."""
        timeline = self.world.node.inventory.containers[container].sandbox.timeline
        return [(step.what, step.error) for step in timeline.steps if step.container]

    def test_the_time_that_each_event_took(self) -> None:
        sandbox = self.run_pod()
        container = self.do(self.world.containers.create(sandbox, box()))
        since = self.world.clock.seconds()  # its agent says that it was created then: at the beginning
        self.assertAlmostEqual(self.line("is created")["seconds"], since)

        async def slowly(*_: object) -> None:
            await sleep(self.world.clock, 2.0)

        for name, words, work in (
            ("before_start", "runs", self.world.containers.start(container)),
            ("release", "is removed", self.world.containers.remove(container)),
        ):
            patch = self.patch(self.world.carried, name, slowly)
            working = start(work)
            self.world.wait(2.0)
            self.successResultOf(working)
            patch.restore()
            self.assertEqual(next(one for one in self.lines() if words in one["message"])["seconds"], 2.0)

    def test_one_that_never_ran_did_not_run_for_years(self) -> None:
        sandbox = self.run_pod()
        container = self.do(self.world.containers.create(sandbox, box()))
        self.world.node.inventory.containers[container].record = self.world.node.inventory.containers[
            container
        ].record.to(ContainerState.EXITED, finished_at=9, exit_code=128, reason="StartError", message="no")
        self.assertNotIn("seconds", self.line("ended: exit code 128", timed=False))
        self.assertIn(("the container has ended", "no"), self.notes(container))

    def test_what_no_step_shows_is_in_the_timeline(self) -> None:
        sandbox = self.run_pod()
        agent = self.world.agents[sandbox]
        container = self.do(self.world.containers.create(sandbox, box()))
        shown = self.world.node.inventory.containers[container]
        self.do(self.world.containers.start(container))
        told = "the container runs, as its agent reports"
        self.assertNotIn(told, [what for what, _ in self.notes(container)])
        shown.record = attrs.evolve(shown.record, state=ContainerState.STARTING)
        self.lines()
        agent.become(container, cri.CONTAINER_RUNNING, started_at=6)
        self.assertIn(told, [what for what, _ in self.notes(container)])

    def test_of_a_command_with_a_long_name_its_beginning_is_logged(self) -> None:
        container = self.do(self.world.containers.create(self.run_pod(), box()))
        log_command(self.world.node.inventory.containers[container], ["x" * 100], "was refused")
        self.line(f"command {'x' * MAX_PROGRAM} in container", container=container, timed=False)

    def test_one_that_is_removed_while_it_runs_has_no_exit_code(self) -> None:
        container = self.do(self.world.containers.create(self.run_pod(), box()))
        self.do(self.world.containers.start(container))
        shown = self.world.node.inventory.containers[container]
        self.lines()
        steps = len(shown.sandbox.timeline.steps)
        shown.record = shown.record.to(ContainerState.REMOVING)
        self.assertEqual((self.lines(), len(shown.sandbox.timeline.steps)), ([], steps))

    def test_a_command_that_is_killed_or_streamed(self) -> None:
        sandbox = self.run_pod()
        container = self.do(self.world.containers.create(sandbox, box()))
        self.do(self.world.containers.start(container))
        self.world.agents[sandbox].exec_error = DeadlineExceeded("no answer")
        call = start(self.world.containers.exec_sync(container, ["sleep", "secret"], 2, None))
        self.failureResultOf(call, DeadlineExceeded)
        self.assertNotIn("secret", json.dumps(self.line("command sleep", container=container)))
        streams = StreamingCalls(Streams(self.world.sandboxes, self.world.containers), lambda *_: "url")
        request = cri.ExecRequest(container_id=container, cmd=["sh", "-c", "secret"], stdout=True)
        self.do(streams.Exec(request, NO_CALL))
        self.assertNotIn("secret", json.dumps(self.line("command sh", container=container, timed=False)))

    def test_a_command_of_no_words(self) -> None:
        sandbox = self.run_pod()
        container = self.do(self.world.containers.create(sandbox, box()))
        log_command(self.world.node.inventory.containers[container], [], "was refused", 1.5)
        self.line("command  in container", container=container)

    def test_one_that_can_not_be_run(self) -> None:
        sandbox = self.run_pod()
        container = self.do(self.world.containers.create(sandbox, box()))
        agent = self.world.agents[sandbox]

        async def refuse(id: str) -> Any:
            agent.become(id, cri.CONTAINER_EXITED, started_at=5, finished_at=5, exit_code=127,
                         reason="ContainerCannotRun")  # fmt: skip
            raise InvalidArgument("no such file")

        async def stopped(id: str, grace_seconds: int, within: float = 30.0) -> Any:
            return agent.containers[id]

        agent.start, agent.stop = refuse, stopped  # type: ignore[method-assign]
        self.failureResultOf(start(self.world.containers.start(container)), InvalidArgument)
        self.line("ended: exit code 127, ContainerCannotRun", container=container, sandbox=sandbox)
