# SPDX-License-Identifier: Apache-2.0
"""Many pods at once on Compute Engine and Azure, with the settings that the providers have by default and the
limits of these clouds; `test_rates` has EC2's."""

from __future__ import annotations

from typing import Any, ClassVar

from libcloud.common.google import GoogleBaseError
from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.azure.cloud import AzureCloud
from infranetes.providers.cloud.gcp import errors
from infranetes.providers.cloud.gcp.cloud import GcpCloud
from infranetes.providers.cloud.interface import Action, CloudError, ErrorKind
from infranetes.providers.cloud.vsphere.cloud import VsphereCloud
from tests.contract.pod_provider_case import reactor
from tests.infranetes.providers.cloud.calls.crowd_case import CrowdCase
from tests.infranetes.providers.cloud.case import AzureCase, CloudCase, GcpCase
from tests.support.clouds.azure_buckets import AzureBuckets
from tests.support.clouds.gce_quotas import GceQuotas

PODS = 100
BOOT_SECONDS = 45.0


class GoogleCrowdTests(CrowdCase):
    """Each call is one request."""

    rates = GcpCloud.rates
    requests: ClassVar = {
        Action.LAUNCH: "launch",
        Action.DESTROY: "destroy",
        Action.CHANGE: "delete disk",
        Action.LOOK: "list instances",
    }

    def setUp(self) -> None:
        super().setUp()
        self.quotas = GceQuotas(self.clock.seconds)

    def serve(self, action: Action, name: str) -> None:
        words = self.quotas.refusal({"Action": self.requests[action]})
        if words:
            raise (
                errors.classify(GoogleBaseError({"message": words}, 403, "rateLimitExceeded"))
                or AssertionError
            )

    def test_a_hundred_pods_take_no_longer_than_their_boots(self) -> None:
        nodes = self.nodes(3)
        for action in (Action.LAUNCH, Action.LOOK, Action.DESTROY):
            self.assertEqual(self.all(PODS, nodes, action), 0.0)
        self.assertEqual(self.quotas.refused, {})

    def test_a_quota_that_others_have_used_up_is_waited_for(self) -> None:
        """Until the next minute, since the answer does not say how long to wait."""
        for _ in range(1450):
            self.quotas.refusal({"Action": "launch"})
        self.clock.advance(20.0)
        seconds = self.all(PODS, self.nodes(2), Action.LAUNCH)
        self.assertGreaterEqual(seconds, 40.0)
        self.assertLessEqual(seconds, 40.0 + 15.0)
        self.assertLess(self.quotas.refused["MutationRequests"], 15)

    def test_one_node_alone_is_never_refused(self) -> None:
        node = self.nodes(1)
        self.all(1600, node, Action.LOOK)
        self.assertEqual(self.quotas.refused, {})


class AzureCrowdTests(CrowdCase):
    """A launch is two requests, or three with a public address; a list is four. Nodes share a principal."""

    rates = AzureCloud.rates

    def setUp(self) -> None:
        super().setUp()
        self.buckets = AzureBuckets(self.clock.seconds)
        self.requests = {
            Action.LAUNCH: ("create network interface", "launch"),
            Action.DESTROY: ("destroy",),
            Action.CHANGE: ("delete network interface",),
            Action.LOOK: ("list VMs", "list states", "get network interface", "get address"),
        }
        self.steps: dict[str, int] = {}  # of each launch, which resumes where it was refused

    def serve(self, action: Action, name: str) -> None:
        requests = self.requests[action]
        done = self.steps.get(name, 0) if action is Action.LAUNCH else 0
        for number in range(done, len(requests)):
            throttled = self.buckets.take({"Action": requests[number], "name": name})
            if throttled is not None:
                raise CloudError(ErrorKind.THROTTLED, throttled.message, throttled.seconds)
            if action is Action.LAUNCH:
                self.steps[name] = number + 1

    def test_a_hundred_pods_take_no_longer_than_their_boots(self) -> None:
        for count in (1, 3):
            self.setUp()
            nodes = self.nodes(count)
            self.assertLessEqual(self.all(PODS, nodes, Action.LAUNCH), 0.05 * BOOT_SECONDS)
            self.assertLessEqual(self.all(PODS, nodes, Action.DESTROY), 0.05 * BOOT_SECONDS)
            self.assertEqual(self.buckets.refused, {})

    def test_with_public_addresses_they_take_what_azure_takes(self) -> None:
        """300 writes, of which 200 are served at once and 10 per second from then on."""
        self.requests[Action.LAUNCH] = ("create address", *self.requests[Action.LAUNCH])
        for count in (1, 3):
            self.buckets, self.steps = AzureBuckets(self.clock.seconds), {}
            seconds = self.all(PODS, self.nodes(count), Action.LAUNCH)
            self.assertLessEqual(seconds, 10.0 + 0.05 * BOOT_SECONDS, f"{count} nodes")

    def test_looks_stay_below_what_azure_serves(self) -> None:
        node = self.nodes(1)
        self.all(400, node, Action.LOOK)
        self.assertEqual(self.buckets.refused, {})


class VsphereCrowdTests(CrowdCase):
    """vCenter documents no limits, so the node's own apply."""

    rates = VsphereCloud.rates

    def serve(self, action: Action, name: str) -> None:
        """Serve everything."""

    def test_a_hundred_pods_are_asked_for_and_ended_at_once(self) -> None:
        """Terminating a VM takes two calls."""
        node = self.nodes(1)
        for action in (Action.LAUNCH, Action.DESTROY, Action.DESTROY):
            self.assertEqual(self.all(PODS, node, action), 0.0, action.value)

    def test_from_then_on_other_clients_have_room(self) -> None:
        node = self.nodes(1)
        self.all(PODS, node, Action.LAUNCH)
        self.assertGreaterEqual(self.all(PODS, node, Action.LAUNCH), 9.9)


class SharedQuota(CloudCase):
    """Two daemons on one cloud, over HTTP."""

    def limit(self) -> Any:
        """Limit the cloud. Return what counts its refusals."""
        raise NotImplementedError

    def lift(self) -> None:
        """Remove the limit."""
        raise NotImplementedError

    async def test_what_was_refused_is_launched_once_the_cloud_serves_it(self) -> None:
        self.settings |= {"calls_per_second": 0.0, "retry_seconds": 60.0}
        self.settings |= {"watch_seconds": 10.0, "poll_seconds": 0.5}  # so that there is little polling
        daemons = await self.started(), await self.started(node="another")
        refused = self.limit()
        specs = [self.spec() for _ in range(3)], [self.spec(node="another") for _ in range(3)]
        launches = [
            self.within(daemon.launch(spec))
            for daemon, mine in zip(daemons, specs, strict=True)
            for spec in mine
        ]
        await self.until(lambda: sum(refused.values()), "some are refused")
        self.lift()
        launched = [await launch for launch in launches]
        self.assertEqual(len({vm.id for vm in launched}), 6)
        for number, vm in enumerate(launched):
            await self.within(daemons[number // 3].destroy(vm.id))
        await self.until(lambda: not self.world.holdings(), "all are ended")


class SharedGoogleTests(GcpCase, SharedQuota, TestCase):
    """One project's quota."""

    def limit(self) -> Any:
        self.patch(errors, "_MINUTE_PAUSE", 0.5)
        self.world.quotas = GceQuotas(reactor.seconds, most=2)
        return self.world.quotas.refused

    def lift(self) -> None:
        self.world.quotas = None


class SharedAzureTests(AzureCase, SharedQuota, TestCase):
    """One subscription's buckets."""

    def limit(self) -> Any:
        self.world.buckets = AzureBuckets(reactor.seconds, scale=0.04)
        return self.world.buckets.refused

    def lift(self) -> None:
        self.world.buckets = None
