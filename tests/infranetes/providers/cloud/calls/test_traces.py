# SPDX-License-Identifier: Apache-2.0
"""Each call to a cloud's API is in the span for which it is made, and names its purpose."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.aws.cloud import AwsCloud
from infranetes.providers.cloud.interface import Action, CloudError, ErrorKind
from infranetes.tracing.spans import Kind, within_span
from tests.infranetes.providers.cloud.calls.crowd_case import CrowdCase
from tests.infranetes.providers.cloud.case import AwsCase
from tests.infranetes.tracing.test_spans import Recorded
from txgrpc import Code


class LaunchTests(AwsCase, TestCase):
    """The launch of a VM on a simulated EC2."""

    async def test_a_launch(self) -> None:
        provider, span = await self.started(), Recorded("call")
        with within_span(span):
            vm = await self.within(provider.launch(self.spec()))
        await self.within(provider.destroy(vm.id))
        [launch] = [each for each in span.children if each.name == "aws: launches"]
        self.assertEqual((launch.kind, launch.ended), (Kind.CLIENT, Code.OK))
        self.assertIn("launch a ", str(launch.attributes["infranetes.cloud.call"]))
        self.assertNotIn("aws: ends of VMs", [each.name for each in span.children])


class FailureTests(CrowdCase):
    """Calls to a cloud that refuses them."""

    rates = AwsCloud.rates

    def serve(self, action: Action, name: str) -> None:
        raise CloudError(ErrorKind.QUOTA, "VcpuLimitExceeded")

    def test_the_kind_of_failure(self) -> None:
        span = Recorded("call")
        with within_span(span):
            self.failureResultOf(self.call(self.nodes(1)[0], Action.LAUNCH), CloudError)
        [call] = span.children
        self.assertEqual((call.name, call.attributes["error.type"]), ("fake: launches", "quota"))
        self.assertIsNot(call.ended, Code.OK)
