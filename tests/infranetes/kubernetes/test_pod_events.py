# SPDX-License-Identifier: Apache-2.0
"""Events about pods are posted to Kubernetes, and nothing waits for that."""

from __future__ import annotations

from pathlib import Path

from twisted.internet.task import Clock
from twisted.trial.unittest import TestCase

from infranetes.kubernetes.api_server import ApiServer
from infranetes.kubernetes.pod_events import CONDITION, TRY_SECONDS, PodEvents
from infranetes_common.concurrency import deferred
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from tests.infranetes.kubernetes.api_server import SimulatedApiServer
from tests.support.waiting import until

reactor = installed()
POD = cri.PodSandboxMetadata(name="web", namespace="shop", uid="u-1", attempt=0)
EVENTS = "/api/v1/namespaces/shop/events"
STATUS = "/api/v1/namespaces/shop/pods/web/status"


class PodEventsTests(TestCase):
    def setUp(self) -> None:
        self.server = SimulatedApiServer(reactor)
        self.server.start()
        self.addCleanup(self.server.stop)
        kubeconfig = self.server.kubeconfig(Path(self.mktemp()))
        self.clock = Clock()
        self.clock.advance(1_700_000_000)
        self.events = PodEvents(self.clock, ApiServer(reactor, kubeconfig), "node-1")
        self.events.startService()
        self.addCleanup(self.events.stopService)

    async def done(self) -> None:
        await until(lambda: not self.events._telling, "all is told, or left out")

    def written(self, path: str) -> list[object]:
        return [document for _, each, document in self.server.written if each == path]

    @deferred
    async def test_an_interruption_is_an_event_and_a_condition(self) -> None:
        for _ in range(2):  # the second one is a repetition
            self.events.interrupted(POD, "EC2 interrupts it")
            await self.done()
        [event] = self.written(EVENTS)
        assert isinstance(event, dict)
        self.assertEqual(event["involvedObject"]["uid"], "u-1")
        self.assertEqual((event["type"], event["reason"]), ("Warning", "Interrupted"))
        self.assertEqual(event["message"], "EC2 interrupts it")
        self.assertEqual(event["firstTimestamp"], "2023-11-14T22:13:20Z")
        patch = self.written(STATUS)[0]
        assert isinstance(patch, dict)
        [condition] = patch["status"]["conditions"]
        self.assertEqual((condition["type"], condition["status"]), (CONDITION, "True"))
        self.assertEqual(patch["metadata"], {"uid": "u-1"})

    @deferred
    async def test_a_pod_that_has_another_vm_is_interrupted_no_more(self) -> None:
        self.events.moved(POD)
        await self.done()
        [patch] = self.written(STATUS)
        assert isinstance(patch, dict)
        self.assertEqual(patch["status"]["conditions"][0]["status"], "False")

    @deferred
    async def test_what_nobody_may_write_is_left_out(self) -> None:
        self.server.refused = {EVENTS, STATUS}
        self.events.interrupted(POD, "EC2 interrupts it")
        await self.done()
        self.assertEqual(self.server.written, [])

    @deferred
    async def test_a_server_that_is_away_is_asked_again_for_a_while(self) -> None:
        self.server.status = 503
        self.events.moved(POD)
        await self.waits()
        self.server.status = 0
        self.clock.advance(5.0)
        await self.done()
        self.assertEqual(len(self.server.written), 1)
        self.server.status = 503
        self.events.moved(POD)
        for _ in range(int(TRY_SECONDS)):
            if not self.events._telling:
                break
            await self.waits()
            self.clock.advance(30.0)
        await self.done()

    @deferred
    async def test_a_daemon_that_ends_tells_nothing_more(self) -> None:
        self.server.status = 503
        self.events.moved(POD)
        await self.waits()
        for _ in range(2):
            self.events.stopService()
        self.assertEqual((self.events._telling, self.clock.getDelayedCalls()), (set(), []))

    async def waits(self) -> None:
        await until(lambda: self.clock.getDelayedCalls() or not self.events._telling, "it waits")
