# SPDX-License-Identifier: Apache-2.0
"""The provider's start in the background, and what the service manager is told of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.daemon.provider_start import ProviderStart
from infranetes.daemon.service_manager import ServiceManager
from infranetes_common.errors import FailedPrecondition, Unavailable


class FakeProvider:
    """A provider that starts when the test says so."""

    name = "fake"

    def __init__(self) -> None:
        self.starts: list[Deferred[None]] = []
        self.networks: list[str] = []
        self.progress: Any = None

    def start(self, progress: Any) -> Deferred[None]:
        self.progress = progress
        self.starts.append(Deferred())
        return self.starts[-1]

    async def configure_network(self, pod_cidr: str) -> None:
        self.networks.append(pod_cidr)


class ProviderStartTests(SynchronousTestCase):
    """Retries, progress and the end."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.provider = FakeProvider()
        self.node = SimpleNamespace(provider=self.provider, clock=self.clock, trouble="starting")
        self.became_ready = 0
        pods: Any = SimpleNamespace(node=self.node, pod_cidr="10.1.0.0/24", provider_started=self.ready)
        self.sent: list[str] = []
        self.service = ProviderStart(pods, ServiceManager(self.sent.append))
        self.service.startService()
        self.outcome = self.service.started.wait()

    def ready(self) -> None:
        self.became_ready += 1

    def test_it_starts(self) -> None:
        self.assertEqual(self.provider.networks, ["10.1.0.0/24"])
        self.provider.progress("building\nthe template")
        self.assertEqual(self.node.trouble, "building\nthe template")
        self.assertEqual(self.sent, ["STATUS=building the template\nEXTEND_TIMEOUT_USEC=120000000"])
        self.assertNoResult(self.outcome)
        self.provider.starts[0].callback(None)
        self.successResultOf(self.outcome)
        self.assertEqual((self.became_ready, self.sent[1:]), (1, ["READY=1\nSTATUS=serving"]))

    def test_a_fault_that_may_pass_is_tried_again_ever_more_slowly(self) -> None:
        for pause in (1.0, 2.0, 4.0):
            self.provider.starts[-1].errback(Unavailable("the cloud is down"))
            self.assertEqual(self.node.trouble, "the cloud is down")
            self.assertEqual(self.sent[-1], "READY=1\nSTATUS=waiting for provider fake: the cloud is down")
            tried = len(self.provider.starts)
            self.clock.advance(pause - 0.1)
            self.assertEqual(len(self.provider.starts), tried)
            self.clock.advance(0.1)
            self.assertEqual(len(self.provider.starts), tried + 1)
        self.assertNoResult(self.outcome)
        self.provider.starts[-1].callback(None)
        self.successResultOf(self.outcome)

    def test_any_other_fault_is_final(self) -> None:
        self.provider.starts[0].errback(FailedPrecondition("no KVM"))
        self.failureResultOf(self.outcome, FailedPrecondition)
        self.assertEqual((self.became_ready, self.clock.getDelayedCalls()), (0, []))

    def test_stopped_meanwhile(self) -> None:
        self.service.stopService()
        self.failureResultOf(self.outcome, CancelledError)
        self.assertEqual(self.became_ready, 0)

    def test_stopped_while_it_pauses(self) -> None:
        self.provider.starts[0].errback(Unavailable("the cloud is down"))
        self.service.stopService()
        self.failureResultOf(self.outcome, CancelledError)
        self.assertEqual(self.clock.getDelayedCalls(), [])
