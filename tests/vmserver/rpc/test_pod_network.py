# SPDX-License-Identifier: Apache-2.0
"""JoinPodNetwork: from the node's client, over the agent's TLS, into a kernel."""

from __future__ import annotations

from pathlib import Path

from infranetes.machines.agent.client import AgentClient
from infranetes_common.errors import InvalidArgument, NotOffered
from infranetes_common.reactors import installed
from infranetes_common.wire import vmserver as messages
from tests.harness.needs import needs_netns, needs_programs
from tests.support.spaces import Space
from tests.vmserver.harness import SANDBOX
from tests.vmserver.rpc.test_agent import AgentCase
from vmserver.network.pod_tunnel import PodTunnel

reactor = installed()


@needs_netns
@needs_programs("busybox")
class JoinPodNetworkTests(AgentCase):
    async def setUp(self) -> None:
        await super().setUp()
        self.space = Space("join")
        self.addCleanup(self.space.end)
        self.space.ip(
            "link add eth0 type veth peer name far0",
            "link set eth0 up",
            "link set far0 up",
            "address add 192.0.2.11/24 dev eth0",
        )
        proc_sys = Path(self.mktemp())
        assert self.agent.service is not None
        self.calls = self.agent.service._agent.pod_network
        self.calls._tunnel = PodTunnel(reactor, proc_sys, self.space.name)
        self.client = AgentClient(SANDBOX, self.agent.channel())
        self.request = messages.JoinPodNetworkRequest(
            address="10.244.3.2",
            gateway="10.244.3.1",
            node_host="192.0.2.1",
            port=2476,
            mtu=1400,
            networks=["10.244.0.0/16"],
        )

    async def test_the_machine_has_the_address_however_often_it_is_told(self) -> None:
        for _ in range(2):
            self.assertEqual(await self.client.join_pod_network(self.request), 1350)
        self.assertIn("inet 10.244.3.2/32", self.space.said("ip", "address", "show", "dev", "pod0"))
        self.assertEqual(self.space.said("ip", "rule").count("10.244.3.2"), 1)

    async def test_what_can_not_be_is_refused(self) -> None:
        self.request.address = "10.244.3.1"
        with self.assertRaises(InvalidArgument):
            await self.client.join_pod_network(self.request)

    async def test_a_machine_that_is_not_one_pods_alone_has_none(self) -> None:
        self.calls._tunnel = None
        with self.assertRaises(NotOffered):
            await self.client.join_pod_network(self.request)
