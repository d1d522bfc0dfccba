# SPDX-License-Identifier: Apache-2.0
"""Firewalls that agents enforce keep the same promises as those that providers enforce, once they are set."""

from __future__ import annotations

import functools
import secrets
import subprocess
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import attrs
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase
from zope.interface import implementer

from infranetes.machines.agent.client import AgentClient
from infranetes.providers.interface import IFirewallsPods
from infranetes_common.concurrency import deferred, run_in_thread
from infranetes_common.errors import NotFound
from infranetes_common.pod_firewall import PodFirewall
from infranetes_common.reactors import installed
from tests.contract.firewalled_pods import FirewalledPodsContract, Talk
from tests.harness.needs import needs_netns
from tests.support import pod_namespaces
from tests.support.pod_namespaces import Connection, Machine, Node, ip
from tests.vmserver.harness import SANDBOX, Agent, run_directory
from vmserver.firewall.firewall import Firewall

reactor = installed()
P = ParamSpec("P")
T = TypeVar("T")
NODE = "198.18.232.1"
STRANGERS_GATEWAY, STRANGER = "198.18.233.1", "198.18.233.2"
PORT = 8000


async def blocking(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await run_in_thread(reactor, functools.partial(work, *args, **kwargs))


@attrs.frozen
class Vm:
    """A namespace, and the agent that manages its firewall."""

    machine: Machine
    agent: Agent


@implementer(IFirewallsPods)
class Agents:
    """A node's connections to its VMs' agents. :param vms: the VMs, by id."""

    def __init__(self, vms: dict[str, Vm]) -> None:
        # From the node's own address, which packets have in the VM.
        self._clients = {id: AgentClient(SANDBOX, vm.agent.channel(host=NODE)) for id, vm in vms.items()}
        self._vms = vms

    @deferred
    async def set_firewall(self, instance_id: str, firewall: PodFirewall) -> None:
        if instance_id not in self._vms:
            raise NotFound(f"there is no VM {instance_id}")
        if instance_id not in self._clients:
            channel = self._vms[instance_id].agent.channel(host=NODE)
            self._clients[instance_id] = AgentClient(SANDBOX, channel)
        await self._clients[instance_id].set_firewall(firewall)


class Talking:
    """A connection between namespaces."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def goes_on(self, expected: bool) -> bool:
        return await blocking(self._connection.carries, expected)


@needs_netns
class FirewallsOfAgentsTests(FirewalledPodsContract, TestCase):
    timeout = 300.0
    stranger = STRANGER

    async def setUp(self) -> None:
        self.vms: dict[str, Vm] = {}
        await blocking(self.connect)

    def connect(self) -> None:
        interface = f"vs{secrets.token_hex(4)}"
        self.outside = Machine(interface, STRANGER, STRANGERS_GATEWAY, "02:00:00:00:00:03")
        self.addCleanup(self.outside.end)
        ip("address", "add", f"{STRANGERS_GATEWAY}/24", "dev", interface)
        subprocess.run(["sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)
        self.node = Node(NODE)
        self.addCleanup(self.node.end)

    async def enforcer(self) -> IFirewallsPods:
        return Agents(self.vms)

    async def machine(self, enforcer: IFirewallsPods) -> str:
        number = len(self.vms) + 2
        address = f"198.18.232.{number}"
        interface = f"vm{secrets.token_hex(4)}"
        machine = await blocking(Machine, interface, address, NODE, f"02:00:00:00:01:{number:02x}")
        self.addCleanup(machine.end)
        await blocking(ip, "address", "add", NODE, "peer", address, "dev", interface)
        agent = Agent(reactor, run_directory(self))
        self.addCleanup(lambda: Deferred.fromCoroutine(agent.stop()))
        service = await agent.start(agent.authority.identity(SANDBOX, listen=f"{NODE}:0"))
        service._agent.firewall._firewall = Firewall(reactor, machine.name)
        self.vms[machine.name] = Vm(machine, agent)
        return machine.name

    async def next_daemon(self, enforcer: IFirewallsPods) -> IFirewallsPods:
        for vm in self.vms.values():
            for channel in vm.agent.channels:
                await channel.close()
        return Agents(self.vms)

    async def destroy(self, enforcer: IFirewallsPods, machine: str) -> None:
        vm = self.vms.pop(machine)
        await vm.agent.stop()
        await blocking(vm.machine.end)

    def break_enforcing(self) -> Callable[[], None]:
        broken = self.patch(Firewall, "_apply", self.refuse)
        return lambda: broken.restore()

    async def refuse(self, script: str) -> None:
        raise NotFound("nft is not there")

    async def port(self, machine: str) -> int:
        return PORT

    async def reaches(self, machine: str, by_node: bool, expected: bool) -> bool:
        client = self.node if by_node else self.outside
        made = await blocking(pod_namespaces.tcp, client, self.vms[machine].machine, PORT, expected)
        if made is not None:
            made.end()
        return made is not None

    async def talk(self, machine: str) -> Talk:
        made = await blocking(pod_namespaces.tcp, self.outside, self.vms[machine].machine, PORT, True)
        assert made is not None
        self.addCleanup(made.end)
        return Talking(made)
