# SPDX-License-Identifier: Apache-2.0
"""SetFirewall: from the node's client, over the agent's TLS."""

from __future__ import annotations

from ipaddress import ip_network
from types import SimpleNamespace
from typing import Any

from infranetes.machines.agent.client import AgentClient
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotOffered, Unavailable
from infranetes_common.pod_firewall import CLOSED, OPEN, Allowed, PodFirewall, Ports
from infranetes_common.wire import vmserver
from tests.harness.needs import needs_programs
from tests.vmserver.harness import SANDBOX
from tests.vmserver.rpc.test_agent import AgentCase
from vmserver.identity.serial_listener import NODE
from vmserver.rpc.firewall import FirewallCalls

NETWORKS = tuple(ip_network(each) for each in ("10.0.0.0/8", "192.0.2.1/32", "fd00::/8"))
PORTS = (Ports("SCTP", 7, 7), Ports("TCP", 80, 90), Ports("UDP", 53, 53))
RICH = PodFirewall(ingress=(Allowed(NETWORKS), Allowed(NETWORKS[:1], PORTS)), egress=(Allowed((), ()),))


class Noted:
    """Record firewalls. :ivar trouble: the error of each call."""

    trouble = ""

    def __init__(self) -> None:
        self.put_there: list[tuple[PodFirewall, str, int]] = []

    async def put(self, firewall: PodFirewall, node: str, tunnel_port: int) -> None:
        if self.trouble:
            raise Unavailable(self.trouble)
        self.put_there.append((firewall, node, tunnel_port))


@needs_programs("busybox")
class SetFirewallTests(AgentCase):
    async def setUp(self) -> None:
        await super().setUp()
        self.firewall = Noted()
        self.use(self.firewall)
        self.client = AgentClient(SANDBOX, self.agent.channel())

    def use(self, firewall: Any) -> None:  # Any: None, or what takes firewalls
        assert self.agent.service is not None
        self.agent.service._agent.firewall._firewall = firewall

    async def test_what_the_node_says_is_what_the_vm_has(self) -> None:
        for firewall in (RICH, OPEN, CLOSED, CLOSED):
            await self.client.set_firewall(firewall)
            self.assertEqual(self.firewall.put_there[-1], (firewall, "127.0.0.1", 0))
        await self.client.set_firewall(CLOSED, 2476)
        self.assertEqual(self.firewall.put_there[-1], (CLOSED, "127.0.0.1", 2476))
        with self.assertRaises(InvalidArgument):
            await self.client.set_firewall(CLOSED, 65536)

    async def test_what_fails_is_said(self) -> None:
        self.firewall.trouble = "nft is broken"
        with self.assertRaises(Unavailable) as caught:
            await self.client.set_firewall(CLOSED)
        self.assertIn("nft is broken", str(caught.exception))

    async def test_an_agent_that_does_not_see_its_nodes_address_refuses(self) -> None:
        """It is called by the hypervisor's port; a firewall without the node would cut its probes off."""
        calls = FirewallCalls(self.firewall)  # type: ignore[arg-type]
        call: Any = SimpleNamespace(peer=NODE)
        with self.assertRaises(FailedPrecondition):
            await calls.SetFirewall(vmserver.SetFirewallRequest(), call)
        self.assertEqual(self.firewall.put_there, [])

    async def test_a_machine_that_is_not_the_pods_alone_has_none(self) -> None:
        self.use(None)
        for _ in range(2):
            with self.assertRaises(NotOffered):
                await self.client.set_firewall(CLOSED)
