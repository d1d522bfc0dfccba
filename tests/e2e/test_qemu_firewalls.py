# SPDX-License-Identifier: Apache-2.0
"""Firewalls of QEMU's real VMs: who reaches their agents' port, which every VM serves."""

from __future__ import annotations

import secrets
import subprocess
from ipaddress import ip_network

import attrs
from twisted.trial.unittest import TestCase
from zope.interface.verify import verifyObject

from infranetes.providers.interface import IFirewallsPods, Instance, ProviderContext
from infranetes.providers.qemu import QemuProvider
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import NotFound
from infranetes_common.pod_firewall import CLOSED, OPEN, Allowed, PodFirewall, Ports
from tests.contract.pod_provider_case import reactor
from tests.e2e.qemu_case import BRIDGE, QemuCase
from tests.support.pod_namespaces import ARRIVES, Host, Machine, Node, connects, ip

OUTSIDE_OF_NODE, OUTSIDE = "198.18.213.1", "198.18.213.2"
DOES_NOT = 3.0  # seconds in which an emulated VM would have answered


class QemuFirewallsTests(QemuCase, TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.node_itself = Node("10.213.0.1")
        self.addCleanup(self.node_itself.end)
        interface = f"out{secrets.token_hex(4)}"
        self.outside = Machine(interface, OUTSIDE, OUTSIDE_OF_NODE, "02:00:00:00:00:03")
        self.addCleanup(self.outside.end)
        ip("address", "add", f"{OUTSIDE_OF_NODE}/24", "dev", interface)

    def context(self, cluster: str | None = None, node: str | None = None) -> ProviderContext:
        return attrs.evolve(super().context(cluster, node), network_policies=True)

    async def reaches(self, client: Host, instance: Instance, expected: bool) -> None:
        seconds = ARRIVES if expected else DOES_NOT
        found = await run_in_thread(reactor, connects, client, instance.address, instance.agent_port, seconds)
        self.assertEqual(found, expected)

    async def test_a_vms_firewall_from_its_launch_to_its_end(self) -> None:
        provider = await self.enforcing()
        instance = await self.running(provider, self.spec())
        await self.reaches(self.outside, instance, False)
        await self.reaches(self.node_itself, instance, True)
        for firewall, expected in (
            (OPEN, True),
            (CLOSED, False),
            (self.for_outside(instance.agent_port), True),
            (self.for_outside(instance.agent_port + 1), False),
            (self.for_outside(instance.agent_port), True),
        ):
            for _ in range(2):
                await self.within(provider.set_firewall(instance.id, firewall))
            await self.reaches(self.outside, instance, expected)
            await self.reaches(self.node_itself, instance, True)
        other = await self.running(provider, self.spec())
        await self.reaches(self.outside, other, False)
        await self.reaches(self.outside, instance, True)

        await self.within(provider.stop())
        await self.reaches(self.outside, instance, True)
        provider = await self.enforcing()
        await self.reaches(self.outside, other, False)
        await self.reaches(self.outside, instance, True)
        await self.within(provider.set_firewall(other.id, OPEN))
        await self.reaches(self.outside, other, True)

        for gone in (instance, other):
            await self.within(provider.destroy(gone.id))
            for _ in range(2):
                await self.refused(NotFound, provider.set_firewall(gone.id, OPEN))
        tables = subprocess.check_output(["nft", "list", "ruleset"], text=True)
        self.assertIn(f"infranetes_{BRIDGE}_firewalls", tables)
        self.assertNotIn(instance.address, tables)

    async def enforcing(self) -> QemuProvider:
        provider = await self.started()
        assert isinstance(provider, QemuProvider)
        verifyObject(IFirewallsPods, provider)
        return provider

    def for_outside(self, port: int) -> PodFirewall:
        rule = Allowed((ip_network(f"{OUTSIDE}/32"),), (Ports("TCP", port, port),))
        return PodFirewall(ingress=(rule,), egress=())

    async def finish(self) -> None:
        for family in ("bridge", "ip"):
            subprocess.run(["nft", "delete", "table", family, f"infranetes_{BRIDGE}_firewalls"], check=True)
        await super().finish()
