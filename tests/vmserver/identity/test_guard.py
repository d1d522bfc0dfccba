# SPDX-License-Identifier: Apache-2.0
"""The rule in a VM that keeps the agent's port for its node: real packets between namespaces."""

from __future__ import annotations

import functools
import secrets
import select
import socket
import struct
import subprocess
from collections.abc import Callable
from ipaddress import IPv4Network, IPv6Network, ip_address
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import attrs
from cryptography import x509
from twisted.internet.defer import Deferred, succeed
from twisted.internet.protocol import Factory
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.identity.authority import Authority as NodeAuthority
from infranetes.identity.node_addresses import MOST, own_addresses, sources
from infranetes_common.addresses import Address, Network
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import InfranetesError
from infranetes_common.identity import AGENT_PORT, Identity, Route
from infranetes_common.identity import Network as GuestNetwork
from infranetes_common.network_namespaces import thd_in_namespace
from infranetes_common.nftables_watch import open_socket
from infranetes_common.reactors import installed
from tests.harness.durations import slow
from tests.harness.needs import needs_netns
from tests.support.frames import internet_sum
from tests.support.pod_namespaces import DOES_NOT, Machine, Node, connects, ip
from tests.support.waiting import until
from tests.vmserver.harness import SANDBOX
from tests.vmserver.pki import Authority
from vmserver.config import LimitsConfig
from vmserver.identity import guard as guard_module
from vmserver.identity import tls
from vmserver.identity.guard import PortGuard
from vmserver.identity.listener import Listener

reactor = installed()
P = ParamSpec("P")
T = TypeVar("T")
NODE, VM = "198.18.234.1", "198.18.234.2"
OTHER_GATEWAY, OTHER = "198.18.235.1", "198.18.235.2"
NODE6, VM6, NEIGHBOUR6 = "2001:db8:234::1", "2001:db8:234::2", "2001:db8:234::3"
AT = (IPv4Network(NODE), IPv6Network(NODE6))
_FLOOD = 1000


async def blocking(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await run_in_thread(reactor, functools.partial(work, *args, **kwargs))


@slow(3, "packets that must not come, and a rate by the clock")
@needs_netns
class GuardTests(TestCase):
    """A VM, its node, and another machine that reaches the VM by way of the node."""

    async def setUp(self) -> None:
        await blocking(self.connect)
        opener = functools.partial(thd_in_namespace, self.vm.name, open_socket)
        self.guard = PortGuard(reactor, self.vm.name, opener)
        self.addCleanup(lambda: self.guard.watch.end())
        self.addCleanup(self.guard.stop)

    def connect(self) -> None:
        word = secrets.token_hex(4)
        self.interface, self.identification = f"vg{word}", 77
        self.vm = Machine(f"vg{word}", VM, NODE, "02:00:00:00:00:02")
        self.addCleanup(self.vm.end)
        ip("address", "add", f"{NODE}/24", "dev", f"vg{word}")
        ip("address", "add", f"{NODE6}/64", "dev", f"vg{word}", "nodad")
        ip("address", "add", f"{NEIGHBOUR6}/64", "dev", f"vg{word}", "nodad", "preferred_lft", "0")
        ip("-n", self.vm.name, "address", "add", f"{VM6}/64", "dev", "eth0", "nodad")
        self.other = Machine(f"vo{word}", OTHER, OTHER_GATEWAY, "02:00:00:00:00:03")
        self.addCleanup(self.other.end)
        ip("address", "add", f"{OTHER_GATEWAY}/24", "dev", f"vo{word}")
        subprocess.run(["sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)
        self.node = Node(NODE)
        self.addCleanup(self.node.end)
        for port in (AGENT_PORT, 8000):
            self.serve(port)

    def serve(self, port: int) -> None:
        listening = thd_in_namespace(self.vm.name, lambda: socket.socket(socket.AF_INET6, socket.SOCK_STREAM))
        self.addCleanup(listening.close)
        listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind(("::", port))
        listening.listen(4096)

    def begun(self) -> int:
        """Return how many connections the VM's kernel has been asked for."""
        return thd_in_namespace(self.vm.name, self.thd_begun)

    def thd_begun(self) -> int:
        names, values = [
            line.split()
            for line in Path("/proc/thread-self/net/snmp").read_text().splitlines()
            if "Tcp:" in line
        ]
        return int(values[names.index("PassiveOpens")])

    def connects6(self, source: str) -> bool:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as connecting:
            connecting.settimeout(DOES_NOT * 5)
            connecting.bind((source, 0))
            try:
                connecting.connect((VM6, AGENT_PORT))
            except OSError:
                return False
            return True

    async def reaches(self, client: Any, expected: bool, port: int = AGENT_PORT, to: str = VM) -> None:
        seconds = 5.0 if expected else DOES_NOT
        self.assertEqual(
            await blocking(connects, client, to, port, seconds), expected, (client.address, port)
        )

    async def test_only_the_nodes_addresses_get_to_the_port(self) -> None:
        for _ in range(2):
            await self.guard.shut(AGENT_PORT, AT)
        await self.reaches(self.node, True)
        self.assertTrue(await blocking(self.connects6, NODE6))
        before = await blocking(self.begun)
        await self.reaches(self.other, False)
        await self.reaches(self.vm, False)  # a container shares its VM's network
        await self.reaches(self.vm, False, to="127.0.0.1")
        self.assertFalse(await blocking(self.connects6, NEIGHBOUR6))
        self.assertEqual(await blocking(self.begun), before)
        await self.reaches(self.other, True, 8000)
        await self.guard.shut(AGENT_PORT, [IPv4Network("198.18.235.0/24"), IPv4Network(f"{OTHER}/32")])
        await self.reaches(self.other, True)
        await self.reaches(self.node, False)

    async def test_what_is_translated_in_the_vm_and_what_a_tunnel_brings_is_not_the_nodes(self) -> None:
        """Both may have the node's address: the node masquerades what comes by a Service."""
        await self.guard.shut(AGENT_PORT, AT)
        chain = f"type nat hook prerouting priority -100; tcp dport 80 redirect to :{AGENT_PORT}"
        script = f"table ip translated {{\nchain before {{\n{chain}\n}}\n}}\n"
        inside = ["ip", "netns", "exec", self.vm.name]
        await blocking(subprocess.run, [*inside, "nft", "-f", "-"], input=script.encode(), check=True)
        await self.reaches(self.other, False, 80)
        await self.reaches(self.node, True, 80)
        await blocking(ip, "-n", self.vm.name, "link", "set", "eth0", "down")
        await blocking(ip, "-n", self.vm.name, "link", "set", "eth0", "name", "pod0", "up")
        await self.reaches(self.node, True, 8000)
        await self.reaches(self.node, False)

    async def test_no_fragment_slips_by(self) -> None:
        await self.guard.shut(AGENT_PORT, AT)
        # The kernel takes no IPv6 whose first fragment lacks a part of TCP's header.
        for source, to, cuts in ((OTHER, VM, (8, 16, 24)), (NEIGHBOUR6, VM6, (24,))):
            for cut in cuts:
                answered = [
                    await blocking(self.answered, source, to, port, cut) for port in (AGENT_PORT, 8000)
                ]
                self.assertEqual(answered, [False, True], (to, cut))

    def answered(self, source: str, to: str, port: int, cut: int) -> bool:
        """Return whether the VM answers a SYN in two fragments. :param cut: bytes of TCP in the first one."""
        own, other = ip_address(source), ip_address(to)
        segment = (
            struct.pack("!HHIIBBHHH", 40000 + cut, port, 7, 0, 7 << 4, 2, 1024, 0, 0) + b"\2\4\5\xb4\1\1\1\0"
        )
        length = struct.pack("!HH", 6, len(segment))
        total = internet_sum(own.packed + other.packed + length + segment)
        segment = segment[:16] + total.to_bytes(2, "big") + segment[18:]
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as hearing:
            hearing.bind((self.interface, 3))
            with socket.socket(
                socket.AF_INET if own.version == 4 else socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_RAW
            ) as sending:
                for offset, data in ((cut, segment[cut:]), (0, segment[:cut])):
                    sending.sendto(self.fragment(own, other, offset, data), (to, 0))
            while select.select([hearing], [], [], DOES_NOT * 3)[0]:
                frame = hearing.recv(2000)
                if segment[2:4] + segment[:2] in frame[34:60] and b"\0\0\0\x08" in frame[34:70]:
                    return True
        return False

    def fragment(self, source: Address, to: Address, offset: int, data: bytes) -> bytes:
        """Return an IP packet with a fragment of TCP; the one that begins at 0 is not the last."""
        more = offset == 0
        self.identification = self.identification + (not more)
        if source.version == 4:
            field = (0x2000 if more else 0) | offset // 8
            head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(data), self.identification, field, 64, 6, 0)
            return head + source.packed + to.packed + data
        head = struct.pack("!IHBB", 6 << 28, 8 + len(data), 44, 64) + source.packed + to.packed
        return head + struct.pack("!BBHI", 6, 0, offset | more, self.identification) + data

    async def test_a_flood_does_not_get_to_the_listener(self) -> None:
        await self.guard.shut(AGENT_PORT, AT)
        before = await blocking(self.begun)
        await blocking(self.flood)
        self.assertEqual(await blocking(self.begun), before)
        self.patch(guard_module, "AJAR_SECONDS", 0.0)
        self.guard.lost()
        await until(lambda: "strangers" in self.guard._script, "nobody has come")
        await blocking(self.flood)
        self.assertLess(await blocking(self.begun), before + 10)

    def flood(self) -> None:
        for _ in range(_FLOOD):
            with self.other.socket(socket.SOCK_STREAM) as connecting:
                connecting.setblocking(False)
                connecting.connect_ex((VM, AGENT_PORT))

    async def test_a_node_that_seems_to_be_somebody_else_gets_in_when_it_is_missed_and_is_known_then(
        self,
    ) -> None:
        self.patch(guard_module, "AJAR_SECONDS", 0.3)
        await self.guard.shut(AGENT_PORT, [IPv4Network("192.0.2.1/32")])
        await self.reaches(self.other, False)
        await until(lambda: self.guard._ajar and "strangers" in self.guard._script, "it is ajar")
        for _ in range(3):
            await self.reaches(self.other, True)
        came = [await blocking(connects, self.other, VM, AGENT_PORT, DOES_NOT) for _ in range(3)]
        self.assertLess(sum(came), 3, "few of each address")
        self.guard.connected(f"::ffff:{OTHER}")
        await until(lambda: OTHER in self.guard._script, "it is known")
        await self.reaches(self.other, True)
        await self.reaches(self.node, False)
        self.guard.connected(OTHER)
        self.assertFalse(self.guard._ajar)
        self.guard.lost()
        await until(lambda: self.guard._ajar and "strangers" in self.guard._script, "it is missed")
        await self.reaches(self.node, True)
        self.assertTrue(await blocking(self.connects6, NODE6))
        await self.reaches(self.other, True)

    async def test_a_rule_that_somebody_removes_is_made_again(self) -> None:
        await self.guard.shut(AGENT_PORT, AT)
        self.guard.connected(self.node.address)  # otherwise it lets others in after a while
        self.guard.watch.begin()
        await blocking(ip, "netns", "exec", self.vm.name, "nft", "flush", "ruleset")
        inside = ["ip", "netns", "exec", self.vm.name, "nft", "list", "tables"]
        await until(lambda: b"infranetes-agent" in subprocess.check_output(inside), "it is there again")
        await self.guard.mend()
        await self.reaches(self.other, False)

    async def test_one_that_is_removed_before_it_was_looked_at_is_made_again_too(self) -> None:
        async def later() -> None:
            pass

        looking = self.patch(self.guard, "_note", later)
        await self.guard.shut(AGENT_PORT, AT)
        self.guard.connected(self.node.address)
        await blocking(ip, "netns", "exec", self.vm.name, "nft", "flush", "ruleset")
        looking.restore()
        await self.guard._note()
        await self.guard.mend()
        await self.reaches(self.other, False)

    async def test_one_that_is_changed_before_it_was_looked_at_is_made_again_once_that_is_told(self) -> None:
        async def later() -> None:
            pass

        looking = self.patch(self.guard, "_note", later)
        self.guard.watch.begin()
        await self.guard.shut(AGENT_PORT, AT)
        self.guard.connected(self.node.address)
        inside = ["netns", "exec", self.vm.name, "nft"]
        await blocking(ip, *inside, "insert", "rule", "inet", guard_module.TABLE, "agent", "accept")
        looking.restore()
        await self.guard._note()
        await until(lambda: self.cut_off(self.other), "it is made again")

    def cut_off(self, client: Machine) -> bool:
        """Whether a client does not get to the agent's port."""
        return not connects(client, VM, AGENT_PORT, DOES_NOT)

    async def test_a_kernel_that_refuses_is_asked_again(self) -> None:
        async def refuse(script: str) -> None:
            raise InfranetesError("no nftables here")

        refusing = self.patch(self.guard._scripts, "run", refuse)
        await self.guard.shut(AGENT_PORT, AT)
        await self.reaches(self.other, True)
        refusing.restore()
        await self.guard.mend()
        await self.reaches(self.other, False)


class _Guard:
    """Notes what a listener tells it, and when."""

    def __init__(self, told: list[object]) -> None:
        self._told = told

    async def shut(self, port: int, node: list[Network]) -> None:
        self._told.append((port, node))


class ListenerTests(SynchronousTestCase):
    """What the listener has guarded, and when."""

    def setUp(self) -> None:
        self.told: list[object] = []
        self.identity = self.of([NODE, "2001:db8::/48"])

    def of(self, addresses: list[str]) -> Identity:
        """Return an identity of a node with these addresses."""
        authority = NodeAuthority(self.mktemp(), sources=lambda: addresses)
        certificate, key = authority.issue_vm(SANDBOX, 1000)
        return Identity(SANDBOX, certificate, key, authority.ca_pem)

    def listen(self, host: str, port: int, factory: Any) -> Deferred[Any]:
        self.told.append("listens")
        return succeed(None)

    def opened(self, identity: Identity) -> list[object]:
        guard: Any = _Guard(self.told)
        self.told.clear()
        listener = Listener(reactor, "", LimitsConfig(), guard, self.listen)
        listener.inner = Factory()
        self.successResultOf(Deferred.fromCoroutine(listener.open(identity, tls.context(identity))))
        return self.told

    def test_the_rule_is_in_force_before_the_agent_listens(self) -> None:
        node = [IPv4Network(NODE), IPv6Network("2001:db8::/48")]
        self.assertEqual(self.opened(self.identity), [(AGENT_PORT, node), "listens"])
        other = attrs.evolve(self.identity, listen="[::]:4242")
        self.assertEqual(self.opened(other), [(4242, node), "listens"])

    def test_in_a_cnis_network_too_but_not_on_the_nodes_bridge(self) -> None:
        bridged = GuestNetwork("02:00:00:00:00:02", "10.88.0.7/16", "10.88.0.1")
        routed = attrs.evolve(bridged, gateway="", routes=(Route("0.0.0.0/0", "169.254.1.1", onlink=True),))
        self.assertEqual(self.opened(attrs.evolve(self.identity, network=bridged)), ["listens"])
        self.assertEqual(len(self.opened(attrs.evolve(self.identity, network=routed))), 2)

    def test_a_node_that_does_not_say_where_it_is_gets_in(self) -> None:
        for identity in (self.of([]), Authority().identity(SANDBOX)):
            self.assertEqual(self.opened(identity), ["listens"])


class NodeAddressTests(SynchronousTestCase):
    """What a node says of its own addresses."""

    @needs_netns
    def test_all_that_others_see(self) -> None:
        before = {str(each) for each in own_addresses()}
        ip("link", "add", "infaddr0", "type", "bridge")
        self.addCleanup(ip, "link", "del", "infaddr0")
        ip("link", "set", "infaddr0", "up")
        for each in ("198.18.236.1/24", "198.18.236.2/24", "2001:db8:236::1/64"):
            ip("address", "add", each, "dev", "infaddr0")
        found = {str(each) for each in own_addresses()} - before
        self.assertEqual(found, {"198.18.236.1", "198.18.236.2", "2001:db8:236::1"})

    @needs_netns
    def test_not_those_of_services(self) -> None:
        ip("link", "add", "kube-ipvs0", "type", "bridge")
        self.addCleanup(ip, "link", "del", "kube-ipvs0")
        ip("address", "add", "198.18.237.1/32", "dev", "kube-ipvs0")
        self.assertNotIn("198.18.237.1", {str(each) for each in own_addresses()})

    def test_they_are_in_each_certificate_as_they_are_then(self) -> None:
        addresses = [NODE]
        authority = NodeAuthority(self.mktemp(), sources=lambda: addresses)
        for _ in range(2):
            certificate, _ = authority.issue_vm(SANDBOX, 1000)
            named = tls.uris(x509.load_pem_x509_certificate(certificate.encode()))
            expected = [f"infranetes:vm:{SANDBOX}", *(f"infranetes:node-at:{each}" for each in addresses)]
            self.assertEqual(named, expected)
            self.assertEqual(tls.sandbox_id_of(certificate), SANDBOX)
            addresses.append(NODE6)
        told = sources([f"203.0.113.{number}" for number in range(100)])()
        self.assertEqual((len(told), told[0]), (MOST, "203.0.113.0"))
