# SPDX-License-Identifier: Apache-2.0
"""The end of a pod's containers, before its VM is destroyed: what is waited for, and for how long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.logger import ILogObserver, LimitedHistoryLogObserver, LogEvent, globalLogPublisher
from zope.interface import implementer

from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.sandboxes.stop import AGENT_SECONDS
from infranetes.pods.store.states import ContainerState
from infranetes.pods.vm.reports import LOG_SECONDS
from infranetes_common.concurrency import start
from infranetes_common.errors import Unavailable
from infranetes_common.wire import cri
from tests.infranetes.pods.case import ContainersTestCase
from tests.infranetes.pods.fakes import box


class EndTests(ContainersTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.stop_seconds = self.world.times.stopping
        self.drain = self.world.times.drain
        self.given_up = 0
        self.log = LimitedHistoryLogObserver()
        globalLogPublisher.addObserver(self.log)
        self.addCleanup(globalLogPublisher.removeObserver, self.log)

    def lacks(self) -> list[str]:
        """Return what was logged of that the pod is stopped without it."""
        found: list[str] = []

        @implementer(ILogObserver)
        def look(event: LogEvent) -> None:
            if "is stopped nevertheless" in str(event.get("log_format")):
                found.append(f"{event['what']}: {event['error']}")

        self.log.replayTo(look)
        return found

    def stop(self, limit: float | None = None) -> Deferred[None]:
        return start(self.world.sandboxes.stop(self.sandbox, limit))

    def hang(self) -> None:
        """Have the agent answer no request to stop a container."""

        async def never(*_: object) -> Any:
            await Deferred()

        self.patch(self.agent, "stop", never)

    def running(self, name: str = "main") -> str:
        return self.run_container(box(name))

    def wait_until_gone(self, stopping: Deferred[None], seconds: float) -> None:
        """Check that the VM is there until just before these seconds are over, and then no more."""
        self.world.wait(seconds - 1)
        self.assertNoResult(stopping)
        self.assertEqual(len(self.world.provider.instances), 1)
        self.world.wait(2)
        self.successResultOf(stopping)
        self.assertEqual(self.world.provider.instances, {})

    def test_an_agent_that_answers_nothing_is_waited_for_no_longer_than_it_takes_to_stop(self) -> None:
        self.running()
        self.hang()
        self.wait_until_gone(self.stop(), self.stop_seconds)
        (words,) = self.lacks()
        self.assertIn("ending its containers: the agent's answer took longer", words)

    def test_one_that_can_not_be_reached_is_asked_for_nothing(self) -> None:
        self.running()
        self.hang()
        self.agent.silent = True
        self.agent.go_away()
        self.agent.away = False
        self.wait_until_gone(self.stop(), AGENT_SECONDS)

    def test_the_provider_is_not_asked_for_a_vm_whose_agent_is_heard(self) -> None:
        asked: list[str] = []
        get = self.world.provider.get

        def counted(instance_id: str) -> Any:
            asked.append(instance_id)
            return get(instance_id)

        self.patch(self.world.provider, "get", counted)
        self.running()
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.assertEqual(asked, [])

    def test_a_container_that_takes_its_time_to_end_has_that_of_its_log_as_well(self) -> None:
        made, answer = self.running(), Deferred[None]()
        real = self.agent.stop

        async def slowly(*given: Any) -> Any:
            await answer
            return await real(*given)

        self.patch(self.agent, "stop", slowly)
        self.world.logs.slow = Deferred()
        stopping = self.stop()
        self.world.wait(self.stop_seconds - 1)
        answer.callback(None)
        self.world.wait(LOG_SECONDS - 1)
        self.assertNoResult(stopping)
        self.world.logs.slow.callback(None)
        self.successResultOf(stopping)
        self.assertEqual((self.kept(made).exit_code, self.kept(made).message, self.lacks()), (143, "", []))

    def test_loads_under_way_end_before_the_features_let_go(self) -> None:
        self.agent.loaded.clear()
        self.agent.holding = Deferred()
        creating = self.start_create(box("late"))
        creating.addErrback(lambda failure: None)
        busy: list[bool] = []

        class Feature(PodFeature):
            name = "one that looks"

            async def stopping(self, sandbox: Sandbox) -> None:
                busy.append(sandbox.loads.busy)

        self.world.join(Feature())
        self.assertTrue(self.world.node.inventory.sandboxes[self.sandbox].loads.busy)
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.assertEqual(busy, [False])

    def give_up(self, log: Deferred[None]) -> None:
        self.given_up += 1

    def advance_logs(self) -> SimpleNamespace:
        """Have all logs be long, and return that whose `progress` says how far they are."""
        self.world.logs.slow = Deferred(self.give_up)
        log = SimpleNamespace(progress=0, lacking=False)
        for container in self.world.node.inventory.containers.values():
            container.pump = cast(Any, SimpleNamespace(log=log, say=lambda text: None))
        return log

    def test_a_log_that_advances_for_longer_than_anybody_waits_is_given_up_then(self) -> None:
        made = self.running()
        self.agent.become(made, cri.CONTAINER_EXITED)
        log = self.advance_logs()
        stopping = self.stop(120.0)  # of which 15 s are for the VM's end
        for _ in range(20):
            log.progress += 1
            self.world.clock.advance(5)
            self.assertNoResult(stopping)
        log.progress += 1
        self.world.clock.advance(5)
        self.successResultOf(stopping)
        (words,) = self.lacks()
        self.assertIn("writing the rest of its logs", words)
        self.assertEqual(self.given_up, 1)

    def test_meanwhile_it_is_looked_at_when_something_may_have_changed_and_not_all_the_time(self) -> None:
        self.agent.become(self.running(), cri.CONTAINER_EXITED)
        log = self.advance_logs()
        stopping = self.stop(300.0)
        least = self.stop_seconds + self.drain
        while least > 0:
            log.progress += 1
            least -= 5
            self.world.clock.advance(5)
        log.progress += 1
        now = self.world.clock.seconds()
        self.assertEqual(
            [call.getTime() - now for call in self.world.clock.getDelayedCalls() if call.getTime() < now + 1],
            [],
        )
        assert self.world.logs.slow is not None
        self.world.logs.slow.callback(None)
        self.successResultOf(stopping)

    def test_one_whose_agent_fails_to_end_it_is_stopped_and_that_is_logged(self) -> None:
        made = self.running()

        async def fails(*_: object) -> Any:
            raise Unavailable("its cgroup is busy")

        self.patch(self.agent, "stop", fails)
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.assertIs(self.kept(made).state, ContainerState.EXITED)
        self.assertEqual(self.lacks(), ["ending its containers: its cgroup is busy"])
