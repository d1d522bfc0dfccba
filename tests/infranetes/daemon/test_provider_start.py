# SPDX-License-Identifier: Apache-2.0
"""The provider starts in the background; the service manager is notified of its progress."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.daemon.provider_start import AWAITED_SECONDS, UNDO_SECONDS, ProviderStart
from infranetes.daemon.service_manager import ServiceManager
from infranetes.pods.node.node_providers import Providers
from infranetes.providers.interface import Awaited
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, Unavailable


class FakeProvider:
    """A provider that starts when the test says so."""

    def __init__(self, name: str = "fake") -> None:
        self.name = name
        self.starts: list[Deferred[None]] = []
        self.networks: list[str] = []
        self.progress: Any = None

    def start(self, progress: Any) -> Deferred[None]:
        self.progress = progress
        self.starts.append(Deferred())
        return self.starts[-1]

    async def configure_network(self, pod_cidr: str) -> None:
        self.networks.append(pod_cidr)


def providers_of(own: Any, *others: Any) -> Providers:
    """Return the providers of a node that has these."""
    providers = Providers.__new__(Providers)
    providers.own, providers.by_name = (
        own,
        {node_provider.name: node_provider for node_provider in (own, *others)},
    )
    return providers


class SeveralProvidersTests(SynchronousTestCase):
    """Each provider starts, fails and is retried independently."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.providers = {name: FakeProvider(name) for name in ("west", "east")}
        self.node_providers: Any = {
            name: SimpleNamespace(
                name=name, provider=provider, trouble="starting", gets_subnet=name == "east"
            )
            for name, provider in self.providers.items()
        }
        providers = providers_of(*self.node_providers.values())
        self.ready: list[str] = []
        pods: Any = SimpleNamespace(pod_cidr="10.1.0.0/24", provider_started=self.started)
        self.sent: list[str] = []
        self.service = ProviderStart(self.clock, providers, pods, ServiceManager(self.sent.append))
        self.service.startService()
        self.outcome = self.service.started.wait()

    def started(self, node_provider: Any) -> None:
        self.ready.append(node_provider.name)
        node_provider.trouble = ""

    def test_the_first_that_starts_is_enough_to_serve(self) -> None:
        self.providers["west"].progress("finding networks")
        self.providers["east"].starts[0].callback(None)
        self.successResultOf(self.outcome)
        self.assertEqual(self.ready, ["east"])
        self.assertEqual(self.sent[-1], "READY=1\nSTATUS=serving; provider west: finding networks")
        self.providers["west"].progress("making a template")
        self.assertEqual(self.sent[-1], "READY=1\nSTATUS=serving; provider west: making a template")
        self.providers["west"].starts[0].callback(None)
        self.assertEqual((self.ready, self.sent[-1]), (["east", "west"], "READY=1\nSTATUS=serving"))

    def test_only_one_is_given_the_nodes_subnet(self) -> None:
        found = {name: each.networks for name, each in self.providers.items()}
        self.assertEqual(found, {"west": [], "east": ["10.1.0.0/24"]})

    def test_one_that_never_starts_stops_no_other(self) -> None:
        self.providers["west"].starts[0].errback(FailedPrecondition("no KVM"))
        self.assertNoResult(self.outcome)
        self.assertIn("no KVM", self.node_providers["west"].trouble)
        self.providers["east"].starts[0].callback(None)
        self.successResultOf(self.outcome)
        self.assertIn("serving; provider west: it can't start: no KVM", self.sent[-1])

    def test_one_that_is_tried_again_holds_up_no_other(self) -> None:
        self.providers["west"].starts[0].errback(Unavailable("the cloud is down"))
        self.providers["east"].starts[0].callback(None)
        self.assertEqual(self.sent[-1], "READY=1\nSTATUS=serving; provider west: the cloud is down")
        self.clock.advance(1.0)
        self.providers["west"].starts[1].callback(None)
        self.assertEqual((self.ready, self.sent[-1]), (["east", "west"], "READY=1\nSTATUS=serving"))

    def test_where_none_ever_starts_the_end_is_told(self) -> None:
        for name, provider in self.providers.items():
            self.assertNoResult(self.outcome)
            provider.starts[0].errback(FailedPrecondition(f"no {name}"))
        self.failureResultOf(self.outcome, FailedPrecondition)

    def test_all_are_stopped(self) -> None:
        self.service.stopService()
        self.failureResultOf(self.outcome, CancelledError)
        self.assertEqual(self.ready, [])


class ProviderStartTests(SynchronousTestCase):
    """Retries, progress and completion."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.provider = FakeProvider()
        self.node_provider = SimpleNamespace(
            name="fake", provider=self.provider, trouble="starting", gets_subnet=True
        )
        providers = providers_of(self.node_provider)
        self.became_ready = 0
        pods: Any = SimpleNamespace(pod_cidr="10.1.0.0/24", provider_started=self.ready)
        self.sent: list[str] = []
        self.service = ProviderStart(self.clock, providers, pods, ServiceManager(self.sent.append))
        self.service.startService()
        self.outcome = self.service.started.wait()

    def ready(self, node_provider: Any) -> None:
        node_provider.trouble = ""
        self.became_ready += 1

    def test_it_starts(self) -> None:
        self.assertEqual(self.provider.networks, ["10.1.0.0/24"])
        self.provider.progress("building\nthe template")
        self.assertEqual(self.node_provider.trouble, "building\nthe template")
        self.assertEqual(self.sent, ["STATUS=building the template\nEXTEND_TIMEOUT_USEC=120000000"])
        self.assertNoResult(self.outcome)
        self.provider.starts[0].callback(None)
        self.successResultOf(self.outcome)
        self.assertEqual((self.became_ready, self.sent[1:]), (1, ["READY=1\nSTATUS=serving"]))

    def test_a_fault_that_may_pass_is_tried_again_ever_more_slowly(self) -> None:
        for pause in (1.0, 2.0, 4.0):
            self.provider.starts[-1].errback(Unavailable("the cloud is down"))
            self.assertEqual(self.node_provider.trouble, "the cloud is down")
            self.assertEqual(self.sent[-1], "READY=1\nSTATUS=waiting for provider fake: the cloud is down")
            tried = len(self.provider.starts)
            self.clock.advance(pause - 0.1)
            self.assertEqual(len(self.provider.starts), tried)
            self.clock.advance(0.1)
            self.assertEqual(len(self.provider.starts), tried + 1)
        self.assertNoResult(self.outcome)
        self.provider.starts[-1].callback(None)
        self.successResultOf(self.outcome)

    def test_what_is_under_way_is_looked_at_often_and_told_when_it_gets_on(self) -> None:
        for words in ("installing Debian", "installing Debian", "making a disk"):
            self.provider.starts[-1].errback(Awaited(words))
            self.assertEqual(self.sent[-1], f"READY=1\nSTATUS=waiting for provider fake: {words}")
            self.clock.advance(AWAITED_SECONDS)
        self.assertEqual((len(self.provider.starts), len(self.sent)), (4, 2))
        self.provider.starts[-1].callback(None)
        self.successResultOf(self.outcome)

    def test_what_kubelet_and_the_service_manager_are_told_has_no_secrets(self) -> None:
        self.provider.starts[-1].errback(Unavailable("https://me:hunter22@proxy.example refuses"))
        self.assertEqual(self.node_provider.trouble, "https://(hidden)@proxy.example refuses")
        self.assertNotIn("hunter22", self.sent[-1])

    def test_any_other_fault_is_final(self) -> None:
        self.provider.starts[0].errback(FailedPrecondition("no KVM"))
        self.failureResultOf(self.outcome, FailedPrecondition)
        self.assertEqual((self.became_ready, self.clock.getDelayedCalls()), (0, []))

    def test_stopped_meanwhile(self) -> None:
        self.service.stopService()
        self.failureResultOf(self.outcome, CancelledError)
        self.assertEqual(self.became_ready, 0)

    def begin_what_is_to_undo(self) -> Deferred[None]:
        """Begin a start that undoes what it had begun once it is cancelled, until this is fired."""
        undone: Deferred[None] = Deferred()

        async def work() -> None:
            try:
                await Deferred()
            finally:
                await undone

        self.provider.starts[0].errback(Unavailable("the cloud is down"))
        self.patch(self.provider, "start", lambda progress: start(work()))
        self.clock.advance(1.0)
        return undone

    def test_a_stop_waits_until_what_was_begun_is_undone(self) -> None:
        undone = self.begin_what_is_to_undo()
        stopped = self.service.stopService()
        self.assertNoResult(stopped)
        undone.callback(None)
        self.successResultOf(stopped)
        self.failureResultOf(self.outcome, CancelledError)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_stop_does_not_wait_for_ever(self) -> None:
        undone = self.begin_what_is_to_undo()
        stopped = self.service.stopService()
        self.clock.advance(UNDO_SECONDS)
        self.successResultOf(stopped)
        undone.callback(None)
        self.failureResultOf(self.outcome, CancelledError)

    def test_stopped_while_it_pauses(self) -> None:
        self.provider.starts[0].errback(Unavailable("the cloud is down"))
        self.service.stopService()
        self.failureResultOf(self.outcome, CancelledError)
        self.assertEqual(self.clock.getDelayedCalls(), [])
