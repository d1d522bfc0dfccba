# SPDX-License-Identifier: Apache-2.0
"""If one sandbox's data can't be sent, the answers about the others are still right."""

from __future__ import annotations

from typing import Any

from twisted.logger import LogLevel, capturedLogs

from infranetes.cri import events, stats
from infranetes.cri.events import EventCalls
from infranetes.cri.stats import StatsCalls
from infranetes.stats import metrics
from infranetes_common.concurrency import start
from infranetes_common.wire import cri, vmserver
from tests.infranetes.cri.support import NO_CALL
from tests.infranetes.cri.test_events import Listening
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import box, pod


class StatsTests(PodsTestCase):
    """Three pods; the figures of one are invalid, as if validation had missed them."""

    def setUp(self) -> None:
        super().setUp()
        self.calls = StatsCalls(
            self.world.clock,
            self.world.listing,
            self.world.node.providers,
            self.world.sandboxes,
            self.world.containers,
        )
        self.pods = [self.a_pod(name) for name in ("a", "b", "c")]
        self.bad = self.pods[1]

    def a_pod(self, name: str) -> str:
        id = self.run_pod(pod(name, uid=name))
        self.successResultOf(start(self.world.containers.create(id, box())))

        async def figures(within: float) -> Any:
            used = [vmserver.ContainerUsage(id=one) for one in self.world.agents[id].containers]
            return vmserver.StatsResponse(machine=vmserver.Usage(time_nanos=1), containers=used)

        self.world.agents[id].stats = figures  # type: ignore[attr-defined]
        return id

    def asked(self, call: Any) -> bytes:
        asking = start(call)
        for _ in range(50):
            self.world.clock.advance(0)
        return bytes(self.successResultOf(asking))

    def lists(self) -> list[set[str]]:
        """Return the pods that each list contains."""
        pods = self.asked(self.calls.ListPodSandboxStats(cri.ListPodSandboxStatsRequest(), NO_CALL))
        containers = self.asked(self.calls.ListContainerStats(cri.ListContainerStatsRequest(), NO_CALL))
        found = self.asked(self.calls.ListPodSandboxMetrics(cri.ListPodSandboxMetricsRequest(), NO_CALL))
        of = {one.id: one.sandbox.id for one in self.world.node.inventory.containers.values()}
        return [
            {one.attributes.id for one in cri.ListPodSandboxStatsResponse.FromString(pods).stats},
            {of[one.attributes.id] for one in cri.ListContainerStatsResponse.FromString(containers).stats},
            {one.pod_sandbox_id for one in cri.ListPodSandboxMetricsResponse.FromString(found).pod_metrics},
        ]

    def test_lists_that_are_made_at_once_share_a_turn_of_the_reactor(self) -> None:
        real, made = stats._of_sandbox, 0

        def slow(*of: Any) -> Any:
            nonlocal made
            made += 1
            self.world.clock.rightNow += 0.006
            return real(*of)

        self.patch(stats, "_of_sandbox", slow)
        request = cri.ListPodSandboxStatsRequest()
        asking = [start(self.calls.ListPodSandboxStats(request, NO_CALL)) for _ in range(2)]
        before = made
        while not all(each.called for each in asking):
            self.world.clock.advance(0)
            self.assertLessEqual(made - before, 2)  # 10 ms, and the item that ends them
            before = made
        self.assertEqual(made, 6)
        for each in asking:
            found = cri.ListPodSandboxStatsResponse.FromString(bytes(self.successResultOf(each)))
            self.assertEqual(len(found.stats), 3)

    def spoil(self, module: Any, name: str, sandbox_of: Any, instead: Any) -> None:
        real = getattr(module, name)

        def spoilt(of: Any, *figures: Any) -> Any:
            return instead() if sandbox_of(of) == self.bad else real(of, *figures)

        self.patch(module, name, spoilt)

    def test_an_exception_leaves_out_one_and_is_logged_once(self) -> None:
        def fail() -> Any:
            raise ValueError("-1 is no UInt64")

        self.assertEqual(self.lists(), [set(self.pods)] * 3)
        self.spoil(stats, "sandbox_stats", lambda of: of.id, fail)
        self.spoil(stats, "container_stats", lambda of: of.sandbox.id, fail)
        self.spoil(metrics, "sandbox_metrics", lambda of: of.id, fail)
        others = set(self.pods) - {self.bad}
        with capturedLogs() as logs:
            for _ in range(3):
                self.assertEqual(self.lists(), [others] * 3)
        errors = [one for one in logs if one["log_level"] is LogLevel.error]
        self.assertEqual([one["sandbox"] for one in errors], [self.bad])
        self.assertIn("-1 is no UInt64", errors[0]["error"])

    def test_one_that_is_too_large_is_left_out(self) -> None:
        def large() -> Any:
            return cri.PodSandboxStats(
                attributes=cri.PodSandboxAttributes(annotations={"x": "y" * 1_000_000})
            )

        self.spoil(stats, "sandbox_stats", lambda of: of.id, large)
        self.assertEqual(self.lists()[0], set(self.pods) - {self.bad})


class EventTests(PodsTestCase):
    """One pod's containers have more to report than fits."""

    def test_an_event_is_told_without_its_vms_words_and_listening_goes_on(self) -> None:
        calls = EventCalls(self.world.node.inventory, self.world.now)
        listening = Listening(calls)
        self.addCleanup(listening.ended.cancel)
        sandbox = self.run_pod()
        made = [
            self.successResultOf(start(self.world.containers.create(sandbox, box(f"c{n}"))))
            for n in range(40)
        ]
        for one in made:
            self.world.agents[sandbox].become(one, cri.CONTAINER_EXITED, message="é" * 4096, exit_code=1)
        self.world.wait(20.0)
        told = [one for one in listening.events if one.container_event_type == cri.CONTAINER_STOPPED_EVENT]
        self.assertEqual({one.container_id for one in told}, set(made))
        self.assertLess(max(one.ByteSize() for one in listening.events), 2 * events.MAX_EVENT)
        (status,) = (one for one in told[-1].containers_statuses if one.id == made[0])
        self.assertEqual((status.exit_code, len(status.message)), (1, 128))
        self.assertEqual(len(calls._listeners), 1)

    def test_one_that_can_not_be_told_does_not_end_listening(self) -> None:
        calls = EventCalls(self.world.node.inventory, self.world.now)
        listening = Listening(calls)
        self.addCleanup(listening.ended.cancel)
        first = self.run_pod()

        def spoilt(what: Any, sandbox: Any, container: Any) -> Any:
            raise ValueError("no event")

        patched = self.patch(calls, "_event", spoilt)
        self.run_pod(pod("other", uid="u2"))
        patched.restore()
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 2)
        self.do(self.world.sandboxes.stop(first))
        self.assertEqual(listening.told()[-1], (first, cri.CONTAINER_STOPPED_EVENT))
