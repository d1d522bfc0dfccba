# SPDX-License-Identifier: Apache-2.0
"""A pod whose VM the cloud is about to reclaim is not ready, and is moved while its containers still run."""

from __future__ import annotations

from infranetes.cri import translate
from infranetes.pods.features.pod_events import PodEventReports
from infranetes.pods.node.events import EventType
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition
from infranetes_common.wire import cri
from tests.infranetes.pods.case import ContainersTestCase
from tests.infranetes.pods.fakes import box, pod

REASON = "EC2 interrupts the spot instance at 2026-01-01T00:00:00Z (terminate)"


class Told:
    """Record what Kubernetes is told."""

    def __init__(self) -> None:
        self.of: list[tuple[str, int, str]] = []

    def interrupted(self, pod: cri.PodSandboxMetadata, reason: str) -> None:
        self.of.append((pod.name, pod.attempt, reason))

    def moved(self, pod: cri.PodSandboxMetadata) -> None:
        self.of.append((pod.name, pod.attempt, "moved"))


class InterruptionTests(ContainersTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.told = Told()
        self.world.join(PodEventReports(self.told, self.world.node.handlers.of))

    def shown(self) -> int:
        return translate.sandbox_state(self.world.node.inventory.sandboxes[self.sandbox])

    def test_what_was_shown_of_it_before_is_shown_no_more(self) -> None:
        sandbox = self.world.node.inventory.sandboxes[self.sandbox]
        self.assertEqual(translate.sandbox_item(sandbox).state, cri.SANDBOX_READY)
        self.agent.interrupt(REASON)
        self.assertEqual(sandbox.cache, {})
        self.assertEqual(translate.sandbox_item(sandbox).state, cri.SANDBOX_NOTREADY)

    def test_the_sandbox_is_not_ready_and_its_containers_run_on(self) -> None:
        container = self.run_container()
        events: list[EventType] = []
        self.world.node.inventory.events.listen(lambda event, sandbox, container: events.append(event))
        for _ in range(2):
            self.agent.interrupt(REASON)
        self.assertEqual(self.shown(), cri.SANDBOX_NOTREADY)
        self.assertEqual(translate.sandbox_item(self.world.node.inventory.sandboxes[self.sandbox]).state, 1)
        self.assertEqual(events, [EventType.STOPPED])
        shown = self.world.node.inventory.containers[container]
        self.assertEqual(translate.container_item(shown).state, cri.CONTAINER_RUNNING)
        self.assertEqual(self.told.of, [("web", 0, REASON)])

    def test_it_gets_no_more_containers(self) -> None:
        made = self.create()
        self.agent.interrupt(REASON)
        for work in (
            self.start_create(box("other")),
            start(self.world.containers.start(made)),
        ):
            self.assertIn(REASON, str(self.failureResultOf(work, FailedPrecondition).value))

    def test_its_containers_are_stopped_as_kubelet_asks(self) -> None:
        container = self.run_container()
        self.agent.interrupt(REASON)
        self.do(self.world.containers.stop(container, 30))
        self.assertIn(("stop 30", container), self.agent.calls)
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.do(self.world.sandboxes.remove(self.sandbox))
        self.assertNothingLeft()

    def test_the_next_daemon_is_told_again(self) -> None:
        self.run_container()
        self.agent.interrupt(REASON)
        self.world.restart()
        self.world.provider_ready()
        self.assertEqual(self.shown(), cri.SANDBOX_NOTREADY)

    def test_kubernetes_is_told_once_the_pod_has_another_vm(self) -> None:
        for attempt, asked in ((1, {"infranetes.io/spot": "true"}), (2, {})):
            self.run_pod(pod(attempt=attempt, annotations=asked))
        self.assertEqual(self.told.of, [("web", 1, "moved")])
