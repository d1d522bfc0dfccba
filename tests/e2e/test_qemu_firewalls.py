# SPDX-License-Identifier: Apache-2.0
"""Firewalls of real QEMU VMs: which machines reach the agent's port, which every VM serves."""

from __future__ import annotations

import secrets
import select
import socket
import subprocess
from collections.abc import Callable

import attrs
from twisted.trial.unittest import TestCase

from infranetes.providers.interface import IFirewallsPods, Instance, ProviderContext
from infranetes.providers.qemu import QemuProvider
from infranetes.providers.qemu.firewalls import Firewalls
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import Unavailable
from tests.contract.firewalled_pods import ClosedPodsContract, Talk
from tests.contract.pod_provider_case import reactor
from tests.e2e.qemu_case import BRIDGE, QemuCase
from tests.support.pod_namespaces import ARRIVES, Host, Machine, Node, connects, ip

OUTSIDE_OF_NODE, OUTSIDE = "198.18.213.1", "198.18.213.2"
DOES_NOT = 3.0  # seconds within which even an emulated VM would have answered


class AgentTalk:
    """A connection to an agent, which answers and ends it once it receives data that is not TLS."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    async def goes_on(self, expected: bool) -> bool:
        return await run_in_thread(reactor, self._answered, ARRIVES if expected else DOES_NOT)

    def _answered(self, seconds: float) -> bool:
        self._connection.sendall(b"this is no TLS\r\n")
        return bool(select.select([self._connection], [], [], seconds)[0])


class QemuFirewallsTests(QemuCase, ClosedPodsContract, TestCase):
    """The contract, in VMs that are clones."""

    stranger = OUTSIDE
    policies = True

    def setUp(self) -> None:
        super().setUp()
        self.instances: dict[str, Instance] = {}
        self.node_itself = Node("10.213.0.1")
        self.addCleanup(self.node_itself.end)
        interface = f"out{secrets.token_hex(4)}"
        self.outside = Machine(interface, OUTSIDE, OUTSIDE_OF_NODE, "02:00:00:00:00:03")
        self.addCleanup(self.outside.end)
        ip("address", "add", f"{OUTSIDE_OF_NODE}/24", "dev", interface)

    def context(self, cluster: str | None = None, node: str | None = None) -> ProviderContext:
        return attrs.evolve(super().context(cluster, node), network_policies=self.policies)

    async def enforcer(self) -> IFirewallsPods:
        return await self.next_provider()

    async def next_provider(self) -> QemuProvider:
        self.provider = await self.started()
        assert isinstance(self.provider, QemuProvider)
        return self.provider

    async def machine(self, enforcer: IFirewallsPods) -> str:
        instance = await self.running(self.provider, self.spec())
        self.instances[instance.id] = instance
        return instance.id

    async def next_daemon(self, enforcer: IFirewallsPods) -> IFirewallsPods:
        await self.within(self.provider.stop())
        return await self.next_provider()

    async def idle_daemon(self, enforcer: IFirewallsPods) -> IFirewallsPods:
        self.policies = False
        return await self.next_daemon(enforcer)

    async def destroy(self, enforcer: IFirewallsPods, machine: str) -> None:
        address = self.instances[machine].address
        self.assertIn(address, self.tables())
        await self.within(self.provider.destroy(machine))
        self.assertNotIn(address, self.tables())

    def tables(self) -> str:
        found = subprocess.check_output(["nft", "list", "ruleset"], text=True)
        self.assertIn(f"infranetes_{BRIDGE}_firewalls", found)
        return found

    def break_enforcing(self) -> Callable[[], None]:
        broken = self.patch(Firewalls, "_nft", self.refuse)
        return lambda: broken.restore()

    async def refuse(self, script: str) -> None:
        raise Unavailable("nft is not there")

    async def port(self, machine: str) -> int:
        return self.instances[machine].agent_port

    async def reaches(self, machine: str, by_node: bool, expected: bool) -> bool:
        client: Host = self.node_itself if by_node else self.outside
        instance, seconds = self.instances[machine], ARRIVES if expected else DOES_NOT
        return await run_in_thread(reactor, connects, client, instance.address, instance.agent_port, seconds)

    async def talk(self, machine: str) -> Talk:
        connection = await run_in_thread(reactor, self.outside.socket, socket.SOCK_STREAM)
        connection.settimeout(ARRIVES)
        instance = self.instances[machine]
        await run_in_thread(reactor, connection.connect, (instance.address, instance.agent_port))
        return AgentTalk(connection)

    async def finish(self) -> None:
        for family in ("bridge", "ip"):
            table = f"infranetes_{BRIDGE}_firewalls"
            subprocess.run(["nft", "add", "table", family, table], check=True)  # no error if it exists
            subprocess.run(["nft", "delete", "table", family, table], check=True)
        await super().finish()
