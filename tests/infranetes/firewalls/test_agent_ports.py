# SPDX-License-Identifier: Apache-2.0
"""What a node forwards to the agents of its VMs in networks of others: nothing."""

from __future__ import annotations

import functools
import secrets
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import attrs
from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.logger import ILogObserver, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.firewalls import agent_ports
from infranetes.firewalls.agent_ports import FAMILY, AgentPorts, script, table_name
from infranetes.machines.agent.marked import marked_endpoint
from infranetes.pods.features.agent_ports import AgentPortRules
from infranetes.pods.node.handler_config import CNI
from infranetes.pods.node.hooks import PodFeature
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition, InfranetesError
from infranetes_common.identity import AGENT_PORT
from infranetes_common.reactors import installed
from tests.harness.needs import needs_netns
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.enforcing import Enforcing
from tests.infranetes.pods.fakes import FakeNode
from tests.support.pod_namespaces import DOES_NOT, Daemon, Host, Machine, Node, connects, ip

reactor = installed()
P = ParamSpec("P")
T = TypeVar("T")
NODE, VM = "198.18.238.1", "198.18.238.2"
OTHER_GATEWAY, OTHER = "198.18.239.1", "198.18.239.2"
SERVICE = "198.51.100.38"


async def blocking(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await run_in_thread(reactor, functools.partial(work, *args, **kwargs))


@needs_netns
class ForwardTests(TestCase):
    """A VM behind the node, and another machine that comes by the node, as the node or as itself."""

    async def setUp(self) -> None:
        self.table = f"infranetes_agents_{secrets.token_hex(4)}"
        await blocking(self.connect)
        self.ports = AgentPorts(reactor, self.table)
        self.addCleanup(self.ports.stop)
        self.addCleanup(self.ports.release, "vm")

    def connect(self) -> None:
        word = secrets.token_hex(4)
        self.vm = Machine(f"va{word}", VM, NODE, "02:00:00:00:00:02")
        self.addCleanup(self.vm.end)
        ip("address", "add", f"{NODE}/24", "dev", f"va{word}")
        self.other = Machine(f"vo{word}", OTHER, OTHER_GATEWAY, "02:00:00:00:00:03")
        self.addCleanup(self.other.end)
        ip("address", "add", f"{OTHER_GATEWAY}/24", "dev", f"vo{word}")
        subprocess.run(["sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)
        self.node = Node(NODE)
        self.daemon = Daemon(NODE)
        self.addCleanup(self.node.end)
        self.addCleanup(self.daemon.end)
        for port in (AGENT_PORT, 8000):
            listening = self.vm.socket(socket.SOCK_STREAM)
            listening.bind(("0.0.0.0", port))
            listening.listen()
        ip("route", "add", f"{SERVICE}/32", "via", OTHER)
        lead = f"ip daddr {SERVICE} tcp dport 80 dnat to {VM}:{AGENT_PORT}"
        self.addCleanup(subprocess.run, ["nft", "delete", "table", "ip", f"service{word}"], check=True)
        service = f"""table ip service{word} {{
            chain before {{
                type nat hook prerouting priority -100;
                {lead}
            }}
            chain own {{
                type nat hook output priority -100;
                {lead}
            }}
            chain after {{
                type nat hook postrouting priority 100;
                ip daddr {VM} masquerade
            }}
        }}"""
        subprocess.run(["nft", "-f", "-"], input=service.encode(), check=True)

    async def reaches(self, client: Host, to: str, port: int, expected: bool) -> None:
        seconds = 5.0 if expected else DOES_NOT
        self.assertEqual(await blocking(connects, client, to, port, seconds), expected, (to, port))

    def listed(self) -> bytes:
        tables = subprocess.run(
            ["nft", "list", "table", FAMILY, self.table], capture_output=True, check=False
        )
        return tables.stdout

    async def test_what_others_send_to_it_is_dropped_though_it_would_be_from_the_node(self) -> None:
        await self.reaches(self.other, SERVICE, 80, True)
        for _ in range(2):
            self.ports.keep("vm", VM, AGENT_PORT)
        await self.ports.stop()
        for to, port in ((SERVICE, 80), (VM, AGENT_PORT)):
            await self.reaches(self.other, to, port, False)
            await self.reaches(self.node, to, port, False)  # such as kubelet, for a probe
            await self.reaches(self.daemon, to, port, True)
        for client in (self.other, self.node):
            await self.reaches(client, VM, 8000, True)

    async def test_the_daemons_connections_have_the_mark(self) -> None:
        self.ports.keep("vm", VM, AGENT_PORT)
        await self.ports.stop()
        made = await marked_endpoint(reactor, VM, AGENT_PORT, 5.0).connect(Factory.forProtocol(Protocol))
        transport = cast(Any, made).transport
        self.addCleanup(transport.loseConnection)
        self.assertEqual(transport.getPeer(), IPv4Address("TCP", VM, AGENT_PORT))

    async def test_it_is_made_again_and_goes_with_the_last_vm(self) -> None:
        self.ports.keep("vm", VM, AGENT_PORT)
        self.ports.keep("more", "198.18.238.3", 4242)
        await self.ports.stop()
        await blocking(subprocess.run, ["nft", "delete", "table", FAMILY, self.table], check=True)
        await self.ports.sweep()
        self.assertIn(b"198.18.238.3 . 4242", await blocking(self.listed))
        self.ports.release("more")
        self.ports.release("more")
        await self.ports.stop()
        found = await blocking(self.listed)
        self.assertIn(VM.encode(), found)
        self.assertNotIn(b"198.18.238.3", found)
        self.ports.release("vm")
        await self.ports.stop()
        self.assertEqual(await blocking(self.listed), b"")
        await self.ports.sweep()


class TroubleTests(SynchronousTestCase):
    """A node whose kernel, or whose programs, can't do it."""

    def test_it_is_said_once_until_it_works(self) -> None:
        answers = [InfranetesError("no nft")] * 3 + [None, InfranetesError("no nft")]
        said: list[object] = []

        async def check(*_: object) -> bytes:
            error = answers.pop(0)
            if error is not None:
                raise error
            return b""

        async def run(*_: object) -> bytes:
            raise FailedPrecondition("the program nft is missing")

        self.patch(agent_ports, "check", check)
        self.patch(agent_ports, "run", run)
        observer = cast(ILogObserver, said.append)
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)
        ports = AgentPorts(reactor, "never")
        ports.keep("vm", VM, AGENT_PORT)
        for _ in range(4):
            self.successResultOf(Deferred.fromCoroutine(ports.sweep()))
        self.assertEqual((len(said), answers), (2, []))


class ScriptTests(SynchronousTestCase):
    def test_each_daemon_has_a_table_of_its_own(self) -> None:
        names = {table_name(Path(each)) for each in ("/var/lib/infranetes", "/srv/other")}
        self.assertEqual(len(names), 2)

    def test_agents_on_this_machine_and_those_without_an_address_are_left_alone(self) -> None:
        ports = AgentPorts(reactor, "never")
        for host in ("127.0.0.1", "agent.example", "2001:db8::1"):
            ports.keep("vm", host, AGENT_PORT)
        self.assertEqual(script("t", ports._ports), f"table {FAMILY} t {{}}\ndelete table {FAMILY} t\n")


class _Ports:
    """Notes which VMs' agents are kept."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[str, int]] = {}
        self.sweeps = 0

    def keep(self, id: str, host: str, port: int) -> None:
        self.kept[id] = (host, port)

    def release(self, id: str) -> None:
        self.kept.pop(id, None)

    async def sweep(self) -> None:
        self.sweeps += 1


class _PortsNode(FakeNode):
    """A node that keeps its agents' ports."""

    def __init__(self, ports: AgentPorts) -> None:
        self.agent_ports = ports
        super().__init__()

    def make_features(self) -> list[PodFeature]:
        assert self.agent_ports is not None
        return [*super().make_features(), AgentPortRules(self.agent_ports)]


class LifeTests(PodsTestCase):
    """Which VMs' agents are kept, and for how long."""

    def make_world(self) -> FakeNode:
        self.ports = _Ports()
        return _PortsNode(cast(AgentPorts, self.ports))

    def test_as_long_as_there_is_a_vm(self) -> None:
        sandbox = self.run_pod()
        record = self.record(sandbox)
        self.assertEqual(self.ports.kept, {sandbox: (record.agent_host, record.agent_port)})
        self.do(self.world.sandboxes.stop(sandbox))
        self.do(self.world.sandboxes.remove(sandbox))
        self.assertEqual(self.ports.kept, {})

    def test_each_pass_looks_at_their_rules(self) -> None:
        self.assertEqual(self.ports.sweeps, 1)
        self.world.wait(2 * self.world.times.sweep)
        self.assertEqual(self.ports.sweeps, 3)

    def test_not_on_a_bridge_whose_rules_do_it(self) -> None:
        self.world.provider = Enforcing(self.world)
        self.world.restart()
        id = self.run_pod()
        self.assertEqual(self.ports.kept, {})
        sandbox = self.world.node.inventory.sandboxes[id]
        sandbox.record = attrs.evolve(sandbox.record, network=CNI)  # whose VM is on no bridge of ours
        self.world.node.providers.own.connect(id, VM, AGENT_PORT)
        self.assertEqual(self.ports.kept, {id: (VM, AGENT_PORT)})

    def test_not_where_the_agent_listens_at_no_port(self) -> None:
        id = self.run_pod()
        self.ports.kept.clear()
        endpoint: Any = object()
        self.world.node.providers.own.connect(id, VM, AGENT_PORT, endpoint)
        self.assertEqual((self.ports.kept, self.world.endpoints[-1]), ({}, endpoint))
