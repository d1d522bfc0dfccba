# SPDX-License-Identifier: Apache-2.0
"""Many pods at once, with the provider's default settings and EC2's token buckets."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.aws.cloud import AwsCloud
from infranetes.providers.cloud.interface import Action, CloudError, ErrorKind
from infranetes.providers.cloud.settings import CloudSettings
from tests.contract.pod_provider_case import reactor
from tests.infranetes.providers.cloud.calls.crowd_case import STEP, CrowdCase
from tests.infranetes.providers.cloud.case import AwsCase
from tests.support.clouds.ec2_buckets import Ec2Buckets

FORMS = {
    Action.LAUNCH: {"Action": "RunInstances"},
    Action.DESTROY: {"Action": "TerminateInstances"},
    Action.LOOK: {"Action": "DescribeInstances"},
    Action.CHANGE: {"Action": "AssociateAddress"},
}


class CrowdTests(CrowdCase):
    """Nodes of one account."""

    rates = AwsCloud.rates

    def setUp(self) -> None:
        super().setUp()
        self.buckets = Ec2Buckets(self.clock.seconds)

    def serve(self, action: Action, name: str) -> None:
        if not self.buckets.take(FORMS[action]):
            raise CloudError(ErrorKind.THROTTLED, "RequestLimitExceeded")

    def test_a_hundred_launches_take_as_long_as_ec2_takes(self) -> None:
        for count in (1, 2, 3, 5):
            self.buckets = Ec2Buckets(self.clock.seconds)
            seconds = self.all(100, self.nodes(count), Action.LAUNCH)
            self.assertLessEqual(seconds, 1.05 * (100 - 5) / 2.0, f"{count} nodes")

    def test_one_node_alone_is_never_refused(self) -> None:
        node = self.nodes(1)
        for action in Action:
            self.all(150, node, action)
        self.assertEqual(self.buckets.refused, {})

    def test_a_hundred_ends_take_no_time(self) -> None:
        self.assertEqual(self.all(100, self.nodes(1), Action.DESTROY), 0.0)

    def test_throttled_launches_hold_up_nothing_else(self) -> None:
        others, mine = self.nodes(2)
        self.all(5, [others], Action.LAUNCH)  # the account's bucket is empty
        launches = [self.call(mine, Action.LAUNCH) for _ in range(20)]
        self.clock.advance(STEP)
        self.assertGreater(self.buckets.refused["RunInstances"], 0)
        self.assertEqual(list(mine.slowed()), [Action.LAUNCH])
        for action in (Action.LOOK, Action.DESTROY, Action.CHANGE):
            self.assertEqual(self.all(20, [mine], action), 0.0, action)
        while not all(launch.called for launch in launches):
            self.clock.advance(STEP)

    def test_what_can_not_be_served_in_time_is_refused_at_once(self) -> None:
        [node] = self.nodes(1)
        in_time = 5 + int(CloudSettings().retry_seconds * AwsCloud.rates[Action.LAUNCH].per_second)
        made = [self.call(node, Action.LAUNCH) for _ in range(in_time + 20)]
        for late in made[in_time:]:
            self.assertIs(self.failureResultOf(late, CloudError).value.kind, ErrorKind.THROTTLED)
        while not all(each.called for each in made):
            self.clock.advance(STEP)
        for each in made[: in_time - 1]:  # the last one's turn is at the deadline itself
            self.successResultOf(each)
        made[in_time - 1].addErrback(lambda failure: failure.trap(CloudError))

    def test_who_stops_waiting_leaves_the_turn_to_the_next(self) -> None:
        [node] = self.nodes(1)
        self.all(5, [node], Action.LAUNCH)
        first, second = (self.call(node, Action.LAUNCH) for _ in range(2))
        first.cancel()
        self.failureResultOf(first)
        self.clock.advance(0.5)
        self.assertTrue(second.called)
        self.assertEqual(self.clock.getDelayedCalls(), [])


class SharedAccountTests(AwsCase, TestCase):
    """Two daemons with the same account."""

    async def test_vms_are_launched_and_ended_although_ec2_throttles_both(self) -> None:
        self.settings.update(calls_per_second=0.0, retry_seconds=60.0)
        self.world.buckets = Ec2Buckets(reactor.seconds)
        specs = [self.spec() for _ in range(4)], [self.spec(node="another") for _ in range(4)]
        daemons = await self.started(), await self.started(node="another")
        launches = [
            self.within(daemon.launch(spec))
            for daemon, mine in zip(daemons, specs, strict=True)
            for spec in mine
        ]
        launched = [await launch for launch in launches]
        self.assertEqual(len({vm.id for vm in launched}), 8)
        self.assertGreater(self.world.buckets.refused["RunInstances"], 0)
        for number, vm in enumerate(launched):
            await self.within(daemons[number // 4].destroy(vm.id))
        self.assertEqual(self.world.holdings(), [])
