# SPDX-License-Identifier: Apache-2.0
"""Probes of pods that sleep: which answers are repeated, and how long; what wakes the pod all the same."""

from __future__ import annotations

from typing import Any, ClassVar

from twisted.internet.defer import Deferred

from infranetes.pods.sleeping.answers import MOST
from infranetes.pods.sleeping.command_probes import MOST_OUTPUT, CommandProbes
from infranetes.pods.sleeping.idleness import LOOK_SECONDS
from infranetes.providers.annotations import sleep_probes
from infranetes.providers.sleeping import Activity
from infranetes_common.concurrency import start
from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import vmserver
from tests.infranetes.pods.fake_agent import FakeAgent, call
from tests.infranetes.pods.fakes import box, pod
from tests.infranetes.pods.sleeping.sleep_case import MeasuringAgent, SleepCase, SleepingNode
from txgrpc.service import Method

AFTER, REPEATED = 30, 600
PROBE = ["cat", "/healthy"]


_EXEC_SYNC = Method(
    "ExecSync", "/Agent/ExecSync", vmserver.ExecSyncRequest, vmserver.ExecSyncResponse, False, False
)


class GatedAgent(MeasuringAgent):
    """An agent whose commands pass the gate, as those of a real one do.

    :ivar answer: what they come to. :ivar running: a Deferred for which they wait."""

    node: SleepingNode
    answer = vmserver.ExecSyncResponse(stdout=b"well")
    running: Deferred[None] | None = None

    @call
    async def exec_sync(self, id: str, command: Any, *limits: Any) -> vmserver.ExecSyncResponse:
        use = self.node.gate.observer(self.sandbox_id, lambda _: None)(_EXEC_SYNC)
        assert use is not None
        try:
            if self.running is not None:
                await self.running
            self.calls.append((" ".join(command), id))
            return self.answer
        finally:
            use.ended(None, ())


class ProbingNode(SleepingNode):
    def make_agent(self, sandbox_id: str) -> FakeAgent:
        agent = GatedAgent(sandbox_id, self.scheduler)
        agent.node = self
        return agent


class ProbesTests(SleepCase):
    annotations: ClassVar[dict[str, str]] = {
        "infranetes.io/sleep-after": str(AFTER),
        "infranetes.io/sleep-probes": str(REPEATED),
    }
    node = ProbingNode

    def setUp(self) -> None:
        super().setUp()
        assert isinstance(self.agent, GatedAgent)
        self.gated = self.agent

    def probe(self, *command: str, container: str = "") -> vmserver.ExecSyncResponse:
        return self.successResultOf(self.probing(*command, container=container))

    def probing(self, *command: str, container: str = "") -> Deferred[vmserver.ExecSyncResponse]:
        run = self.world.containers.exec_sync
        return start(run(container or self.container, list(command or PROBE), 1, None))

    def ran(self) -> int:
        """Return how many commands the VM has run."""
        return len([each for each, _ in self.agent.calls if each.startswith(("cat", "test"))])

    def passes(self, seconds: float) -> None:
        for _ in range(int(seconds / LOOK_SECONDS)):
            self.world.clock.advance(LOOK_SECONDS)

    def test_a_good_answer_is_repeated_while_the_pod_sleeps(self) -> None:
        self.assertEqual(self.probe().stdout, b"well")
        self.fall_asleep()
        for _ in range(3):
            self.world.clock.advance(REPEATED / 4)
            self.assertEqual(self.probe().stdout, b"well")
            self.assert_asleep()
        self.assertEqual(self.ran(), 1)

    def test_after_its_time_the_pod_is_woken_and_asked(self) -> None:
        self.probe()
        self.fall_asleep()
        self.world.clock.advance(REPEATED + 1)
        self.gated.answer = vmserver.ExecSyncResponse(stdout=b"still well")
        self.assertEqual(self.probe().stdout, b"still well")
        self.assert_awake()
        self.fall_asleep()
        self.assertEqual(self.probe().stdout, b"still well")
        self.assert_asleep()

    def test_one_that_is_awake_is_asked_each_time(self) -> None:
        for count in range(1, 4):
            self.probe()
            self.assertEqual(self.ran(), count)

    def test_another_command_and_another_container_are_other_questions(self) -> None:
        other = self.do(self.world.containers.create(self.pod_id, box("other")))
        self.do(self.world.containers.start(other))
        self.probe()
        for command, container in ((["cat", "/other"], ""), (PROBE, other), (["cat /healthy"], "")):
            self.fall_asleep()
            self.probe(*command, container=container)
            self.assert_awake()

    def test_a_bad_answer_is_not_repeated_nor_the_good_one_before_it(self) -> None:
        self.probe()
        self.gated.answer = vmserver.ExecSyncResponse(exit_code=1)
        self.probe()
        self.fall_asleep()
        self.assertEqual(self.probe().exit_code, 1)
        self.assert_awake()
        self.assertEqual(self.ran(), 3)

    def test_an_answer_that_no_probe_needs_so_long_is_not_kept(self) -> None:
        self.gated.answer = vmserver.ExecSyncResponse(stdout=b"x" * MOST_OUTPUT)
        self.probe()
        self.fall_asleep()
        self.probe()
        self.assert_awake()

    def test_probes_let_the_pod_fall_asleep(self) -> None:
        self.probe()
        for _ in range(AFTER):
            self.passes(LOOK_SECONDS)
            self.probe()
        self.assert_asleep()

    def test_the_processor_time_of_probes_keeps_no_pod_awake_but_more_does(self) -> None:
        self.probe()
        for used, awake in ((0.5, False), (1.5, True)):
            for _ in range(2 * AFTER):
                does = self.sleeps.does
                self.sleeps.does = Activity(does.cpu_nanos + int(used * 1e9), 0)
                self.passes(LOOK_SECONDS)
                self.probe()
            self.assertEqual(self.sandbox.asleep is None, awake)
            self.world.sleeping.called(self.vm)
            self.sleeps.does = Activity(0, 0)

    def test_commands_that_were_not_run_before_keep_it_awake(self) -> None:
        for number in range(AFTER):
            self.passes(LOOK_SECONDS)
            self.probe("cat", str(number % (MOST + 1)))
        self.assert_awake()

    def test_no_pod_falls_asleep_under_a_probe(self) -> None:
        self.probe()
        self.gated.running = Deferred()
        probing = self.probing()
        self.passes(3.5 * AFTER)
        self.assert_awake()
        self.assertNoResult(probing)
        running, self.gated.running = self.gated.running, None
        running.callback(None)
        self.assertEqual(self.successResultOf(probing).stdout, b"well")
        self.passes(LOOK_SECONDS)
        self.assert_asleep()

    def test_each_daemon_asks_the_pod_itself_first(self) -> None:
        self.probe()
        self.fall_asleep()
        self.world.restart()
        self.probe()
        self.assert_awake()
        self.assertEqual(self.ran(), 2)

    def test_nothing_is_remembered_of_one_that_is_gone(self) -> None:
        self.probe()
        [probes] = [each for each in self.world.node.features if isinstance(each, CommandProbes)]
        question = (self.container, *PROBE)
        self.assertTrue(probes._answers.has(self.pod_id, question))
        self.do(self.world.sandboxes.stop(self.pod_id))
        self.assertFalse(probes._answers.has(self.pod_id, question))

    def test_of_a_pod_that_does_not_ask_for_it_nothing_is_repeated(self) -> None:
        other = self.do(self.world.sandboxes.run(pod("other", "u2"), ""))
        container = self.do(self.world.containers.create(other, box()))
        self.do(self.world.containers.start(container))
        for count in (1, 2):
            self.probe(container=container)
            falling = start(self.world.sleeping.sleep(self.world.node.inventory.sandboxes[other]))
            self.world.clock.advance(0)
            self.successResultOf(falling)
            calls = [each for each, _ in self.world.agents[other].calls if each == "cat /healthy"]
            self.assertEqual(len(calls), count)

    def test_what_is_malformed_is_refused(self) -> None:
        for value in ("", "-1", "1.5", "86401", "soon"):
            config = pod("other", "u2", annotations={"infranetes.io/sleep-probes": value})
            self.failureResultOf(start(self.world.sandboxes.run(config, "")), InvalidArgument)
        self.assertEqual(sleep_probes({}), 0.0)
