# SPDX-License-Identifier: Apache-2.0
"""The pod's firewall in its VM, in a real kernel: real packets between namespaces."""

from __future__ import annotations

import contextlib
import functools
import secrets
import socket
import subprocess
from collections.abc import Callable
from ipaddress import ip_network
from typing import ParamSpec, TypeVar

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes_common.concurrency import run_in_thread, sleep
from infranetes_common.errors import InvalidArgument, Unavailable
from infranetes_common.network_namespaces import thd_in_namespace
from infranetes_common.nftables_watch import open_socket
from infranetes_common.pod_firewall import CLOSED, OPEN, Allowed, PodFirewall, Ports
from infranetes_common.reactors import installed
from infranetes_common.wire import vmserver as messages
from tests.harness.needs import needs_netns
from tests.support import pod_namespaces
from tests.support.icmp import REDIRECT, UNREACHABLE, error, quoted
from tests.support.pod_namespaces import (
    ARRIVES,
    DOES_NOT,
    Connection,
    Datagrams,
    Host,
    Machine,
    Node,
    ip,
    ping,
    refused,
    sctp,
    udp,
)
from vmserver.firewall import firewall as firewall_module
from vmserver.firewall.firewall import _ALWAYS, METADATA, TABLE, Firewall
from vmserver.firewall.message import MAX_NETWORKS, as_firewall
from vmserver.network.marked_connections import MARK
from vmserver.rpc.firewall import node_address

reactor = installed()
P = ParamSpec("P")
T = TypeVar("T")
NODE, POD = "198.18.230.1", "198.18.230.2"
OTHER_GATEWAY, OTHER = "198.18.231.1", "198.18.231.2"


async def blocking(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await run_in_thread(reactor, functools.partial(work, *args, **kwargs))


def allowed(*networks: str, ports: tuple[Ports, ...] | None = None) -> Allowed:
    return Allowed(tuple(ip_network(each) for each in networks), ports)


@needs_netns
class FirewallTests(TestCase):
    """A pod, the node from which it is reached, and another machine behind the node."""

    timeout = 300.0

    async def setUp(self) -> None:
        await blocking(self.connect)
        self.firewall = Firewall(reactor, self.pod.name)

    def connect(self) -> None:
        word = secrets.token_hex(4)
        self.interface = f"vp{word}"
        self.pod = Machine(self.interface, POD, NODE, "02:00:00:00:00:02")
        self.addCleanup(self.pod.end)
        ip("address", "add", f"{NODE}/24", "dev", self.interface)
        self.other = Machine(f"vo{word}", OTHER, OTHER_GATEWAY, "02:00:00:00:00:03")
        self.addCleanup(self.other.end)
        ip("address", "add", f"{OTHER_GATEWAY}/24", "dev", f"vo{word}")
        subprocess.run(["sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)
        self.node = Node(NODE)
        self.addCleanup(self.node.end)

    async def put(self, ingress: list[Allowed] | None = None, egress: list[Allowed] | None = None) -> None:
        firewall = PodFirewall(
            None if ingress is None else tuple(ingress), None if egress is None else tuple(egress)
        )
        for _ in range(2):
            await self.firewall.put(firewall, NODE)

    async def reaches(self, client: Host, server: Host, port: int = 8000, to: str = "") -> None:
        made = await self.connection(client, server, port, to)
        for back in (False, True):
            self.assertTrue(await blocking(made.carries, True, back))
        made.end()

    async def connection(self, client: Host, server: Host, port: int = 8000, to: str = "") -> Connection:
        made = await blocking(pod_namespaces.tcp, client, server, port, True, to)
        assert made is not None, f"no connection from {client.address} to {server.address}"
        self.addCleanup(made.end)
        return made

    async def cannot_reach(self, client: Host, server: Host, port: int = 8000, to: str = "") -> None:
        self.assertIsNone(await blocking(pod_namespaces.tcp, client, server, port, False, to))

    async def test_closed_is_for_all_but_the_node_and_the_pod_itself(self) -> None:
        await self.put([], [])
        await self.reaches(self.node, self.pod)
        await self.reaches(self.pod, self.pod)
        await self.cannot_reach(self.pod, self.node)
        await self.cannot_reach(self.other, self.pod)
        await self.cannot_reach(self.pod, self.other)
        for client, server, there in ((self.node, self.pod, True), (self.other, self.pod, False),
                                      (self.pod, self.other, False)):  # fmt: skip
            self.assertEqual(await blocking(ping, client, server, there), there)
            self.assertEqual(await blocking(udp, client, server, 5000, there), there)
            self.assertEqual(await blocking(sctp, client, server, 5000, there), there)

    async def test_the_pod_tells_of_its_own_connections_alone(self) -> None:
        """By ICMP errors, which count as part of the connections that they quote."""
        await self.put()
        made = await blocking(Datagrams, self.other, self.pod, 5000)
        self.addCleanup(made.end)
        self.assertTrue(await blocking(made.there, True))
        theirs, mine = (OTHER, 6000), (POD, 5000)
        for kind, quote, to, there in (
            (UNREACHABLE, quoted(made.heard, mine, socket.IPPROTO_UDP, b"word"), OTHER, True),
            (UNREACHABLE, quoted((NODE, 7000), theirs, socket.IPPROTO_UDP, b"word"), NODE, False),
            (UNREACHABLE, quoted((NODE, 7000), theirs, socket.IPPROTO_TCP, b"word"), NODE, False),
            (REDIRECT, quoted(made.heard, mine, socket.IPPROTO_UDP, b"word"), OTHER, False),
        ):
            self.assertEqual(await blocking(self.told, error(kind, 3, quote), to), there)

    def told(self, message: bytes, to: str) -> bool:
        """Return whether a message of the pod arrives."""
        hearing = (self.other if to == OTHER else self.node).socket(socket.SOCK_RAW, socket.IPPROTO_ICMP)
        with self.pod.socket(socket.SOCK_RAW, socket.IPPROTO_ICMP) as sending, hearing:
            with contextlib.suppress(PermissionError):
                sending.sendto(message, (to, 0))
            return pod_namespaces.comes(hearing, lambda packet: b"word" in packet, False)

    async def test_each_way_is_for_those_that_are_named(self) -> None:
        await self.put(ingress=[allowed(f"{OTHER}/32")])
        await self.reaches(self.other, self.pod)
        await self.reaches(self.pod, self.other)
        await self.put(ingress=[allowed("192.0.2.0/24")])
        await self.cannot_reach(self.other, self.pod)
        await self.reaches(self.pod, self.other)
        await self.put(egress=[allowed(f"{OTHER}/32")])
        await self.reaches(self.pod, self.other)
        await self.reaches(self.other, self.pod)
        await self.cannot_reach(self.pod, self.node)
        await self.put([], [allowed("0.0.0.0/0")])
        await self.reaches(self.pod, self.other)
        await self.reaches(self.pod, self.node)
        self.assertTrue(await blocking(refused, self.pod, self.other, 5999, True))
        await self.cannot_reach(self.other, self.pod)

    async def test_ports_are_of_a_protocol_and_from_the_first_to_the_last(self) -> None:
        ports = (Ports("SCTP", 7000, 7000), Ports("TCP", 80, 90), Ports("UDP", 53, 53))
        for ways, client, server in (
            (([allowed(f"{OTHER}/32", ports=ports)], None), self.other, self.pod),
            ((None, [allowed(f"{OTHER}/32", ports=ports)]), self.pod, self.other),
        ):
            await self.put(*ways)
            for port, there in ((80, True), (85, True), (90, True), (91, False), (53, False)):
                await (self.reaches if there else self.cannot_reach)(client, server, port)
            self.assertTrue(await blocking(udp, client, server, 53, True))
            self.assertFalse(await blocking(udp, client, server, 80, False))
            self.assertTrue(await blocking(sctp, client, server, 7000, True))
            self.assertFalse(await blocking(sctp, client, server, 80, False))
            self.assertFalse(await blocking(ping, client, server, False))

    async def test_what_the_pod_sends_is_judged_where_a_service_leads_it(self) -> None:
        script = f"""table ip services {{
            chain translate {{
                type nat hook output priority -100;
                ip daddr 198.51.100.1 tcp dport 8000 dnat to {OTHER}
            }}
        }}"""
        command = ["ip", "netns", "exec", self.pod.name, "nft", "-f", "-"]
        await blocking(subprocess.run, command, input=script.encode(), check=True)
        await self.put(egress=[allowed(f"{OTHER}/32")], ingress=[])
        await self.reaches(self.pod, self.other, to="198.51.100.1")
        await self.put(egress=[allowed("198.51.100.1/32")], ingress=[])
        await self.cannot_reach(self.pod, self.other, to="198.51.100.1")

    async def test_a_change_is_one_for_connections_that_there_are(self) -> None:
        for client, server in ((self.pod, self.other), (self.other, self.pod)):
            await self.put(None, None)
            made = await self.connection(client, server)
            talk = await blocking(Datagrams, client, server, 5000)
            self.assertTrue(await blocking(talk.there, True) and await blocking(talk.back, True))
            await self.put([], [])
            for back in (False, True):
                self.assertFalse(await blocking(made.carries, False, back))
            self.assertFalse(await blocking(talk.there, False))
            self.assertFalse(await blocking(talk.back, False))
            await self.put([allowed(f"{OTHER}/32")], [allowed(f"{OTHER}/32")])
            self.assertTrue(await blocking(made.carries, True))
            self.assertTrue(await blocking(talk.there, True) and await blocking(talk.back, True))
            made.end()
            talk.end()

    async def test_the_nodes_connection_goes_on_whatever_is_said(self) -> None:
        made = await self.connection(self.node, self.pod)
        for firewall in (CLOSED, OPEN, CLOSED):
            await self.firewall.put(firewall, NODE)
            for back in (False, True):
                self.assertTrue(await blocking(made.carries, True, back))

    async def test_the_nodes_connection_that_was_there_before_goes_on_as_the_pod_answers_it(self) -> None:
        """The agent's answer is the first packet that the firewall sees."""
        for _ in range(2):
            await self.firewall.prepare()
        await self.reaches(self.other, self.pod)
        made = await self.connection(self.node, self.pod)
        await self.firewall.put(CLOSED, NODE)
        for back in (True, False):
            self.assertTrue(await blocking(made.carries, True, back))
        await self.firewall.prepare()
        await self.cannot_reach(self.other, self.pod)

    async def test_what_somebody_changes_is_mended(self) -> None:
        await self.firewall.mend()  # before any firewall was set
        await self.put([], [])
        inside = ["ip", "netns", "exec", self.pod.name, "nft"]
        for change in (f"delete table ip {TABLE}", f"flush chain ip {TABLE} ingress", "flush ruleset"):
            await blocking(subprocess.run, [*inside, change], check=True)
            await self.reaches(self.other, self.pod)
            for _ in range(2):
                await self.firewall.mend()
            await self.cannot_reach(self.other, self.pod)
        before = await blocking(subprocess.check_output, [*inside, "--handle", "list", "ruleset"])
        await self.firewall.mend()
        self.assertEqual(
            await blocking(subprocess.check_output, [*inside, "--handle", "list", "ruleset"]), before
        )

    async def test_what_somebody_changes_before_it_was_looked_at_is_mended_too(self) -> None:
        inserted = f"insert rule ip {TABLE} ingress accept"
        for change, told in ((inserted, True), ("flush ruleset", True), ("flush ruleset", False)):
            await self.put_and_change(change)
            await self.reaches(self.other, self.pod)
            await self.firewall.mend(told)
            await self.cannot_reach(self.other, self.pod)

    async def put_and_change(self, change: str) -> None:
        """Put a firewall, which somebody changes before its tables are listed."""
        listed = self.firewall._listed
        command = ["ip", "netns", "exec", self.pod.name, "nft", change]

        async def changed() -> bytes:
            await blocking(subprocess.run, command, check=True)
            return await listed()

        looking = self.patch(self.firewall, "_listed", changed)
        await self.put([], [])
        looking.restore()

    async def test_what_somebody_changes_is_soon_mended_by_itself(self) -> None:
        firewall = Firewall(reactor, self.pod.name, lambda: thd_in_namespace(self.pod.name, open_socket))
        await firewall.put(CLOSED, NODE)
        firewall.watch.begin()
        self.addCleanup(firewall.watch.end)
        within = ["ip", "netns", "exec", self.pod.name, "nft"]
        before = await blocking(subprocess.check_output, [*within, "list", "ruleset"])
        for change in ("flush ruleset", f"insert rule ip {TABLE} input accept"):
            await blocking(subprocess.run, [*within, change], check=True)
            while await blocking(subprocess.check_output, [*within, "list", "ruleset"]) != before:
                await sleep(reactor, 0.02)
            await firewall.mend()  # once that is done
        await self.cannot_reach(self.other, self.pod)

    async def test_the_agent_asks_the_metadata_service_whatever_is_said(self) -> None:
        """Here it is the other machine, since tests can't use the service's own address."""
        always = {4: tuple(each.replace(METADATA, OTHER) for each in _ALWAYS[4]), 6: _ALWAYS[6]}
        self.patch(firewall_module, "_ALWAYS", always)
        await self.put([], [])
        with thd_in_namespace(self.other.name, lambda: socket.create_server((OTHER, 80))) as service:
            for mark, answered in ((0, False), (MARK, True), (MARK + 1, False)):
                with thd_in_namespace(self.pod.name, socket.socket) as asking:
                    asking.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
                    asking.settimeout(ARRIVES if answered else DOES_NOT)
                    if not answered:
                        with self.assertRaises(TimeoutError):
                            await blocking(asking.connect, (OTHER, 80))
                        continue
                    await blocking(asking.connect, (OTHER, 80))
                    served, _ = await blocking(service.accept)
                    with served:
                        served.sendall(b"notice")
                        self.assertEqual(await blocking(asking.recv, 100), b"notice")

    async def test_the_machine_gets_the_time_of_its_cloud_whatever_is_said(self) -> None:
        """Here it is the other machine, as above."""
        always = {4: tuple(each.replace(METADATA, OTHER) for each in _ALWAYS[4]), 6: _ALWAYS[6]}
        self.patch(firewall_module, "_ALWAYS", always)
        await self.put([], [])
        with thd_in_namespace(
            self.other.name, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        ) as server:
            server.settimeout(ARRIVES)
            server.bind((OTHER, 123))
            with thd_in_namespace(
                self.pod.name, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            ) as client:
                client.settimeout(ARRIVES)
                client.sendto(b"asked", (OTHER, 123))
                _, sender = await blocking(server.recvfrom, 100)
                server.sendto(b"told", sender)
                self.assertEqual(await blocking(client.recv, 100), b"told")
        self.assertFalse(await blocking(udp, self.pod, self.other, 124, False))
        self.assertFalse(await blocking(udp, self.other, self.pod, 123, False))

    async def test_without_one_all_is_open_again(self) -> None:
        await self.put([])
        await self.cannot_reach(self.other, self.pod)
        for _ in range(2):
            await self.firewall.reset()
            await self.reaches(self.other, self.pod)

    async def test_what_nft_refuses_changes_nothing(self) -> None:
        await self.put([])
        wrong = PodFirewall(ingress=(allowed("0.0.0.0/0", ports=(Ports("NONSENSE", 1, 1),)),))
        work = Deferred.fromCoroutine(self.firewall.put(wrong, NODE))
        await self.assertFailure(work, Unavailable)
        await self.cannot_reach(self.other, self.pod)

    async def test_networks_of_both_families_and_thousands_of_them(self) -> None:
        many = [f"10.{number // 256}.{number % 256}.1/32" for number in range(5000)]
        await self.put([allowed(*many, f"{OTHER}/32", "fd00::/8")], [allowed("::/0")])
        await self.reaches(self.other, self.pod)
        await self.cannot_reach(self.pod, self.other)

    async def test_ipv6_finds_its_neighbours_and_is_judged_too(self) -> None:
        await blocking(ip, "address", "add", "fd23::1/64", "dev", self.interface, "nodad")
        await blocking(ip, "-n", self.pod.name, "address", "add", "fd23::2/64", "dev", "eth0", "nodad")
        for ways, there in (([], False), ([allowed("fd23::1/128", ports=(Ports("TCP", 8000, 8000),))], True),
                            ([allowed("fd24::/16")], False)):  # fmt: skip
            await self.put([], ways)
            self.assertEqual(await blocking(self.connects_by_ipv6, there), there)

    def connects_by_ipv6(self, expected: bool) -> bool:
        with socket.socket(socket.AF_INET6) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(("fd23::1", 8000))
            listening.listen()
            with thd_in_namespace(self.pod.name, lambda: socket.socket(socket.AF_INET6)) as connecting:
                connecting.settimeout(ARRIVES if expected else DOES_NOT)
                try:
                    connecting.connect(("fd23::1", 8000))
                except OSError:
                    return False
                return True


class MessageTests(SynchronousTestCase):
    """Which messages the node may send."""

    def rule(self, **fields: object) -> messages.SetFirewallRequest:
        return messages.SetFirewallRequest(
            ingress=messages.FirewallWay(rules=[messages.FirewallRule(**fields)])  # type: ignore[arg-type]
        )

    def test_nothing_is_open_and_an_empty_way_is_closed(self) -> None:
        self.assertEqual(as_firewall(messages.SetFirewallRequest()), OPEN)
        way = messages.FirewallWay()
        self.assertEqual(as_firewall(messages.SetFirewallRequest(ingress=way, egress=way)), CLOSED)

    def test_what_can_not_be_is_refused(self) -> None:
        def ports(protocol: int, first: int, last: int) -> list[messages.FirewallPorts]:
            return [messages.FirewallPorts(protocol=protocol, first=first, last=last)]

        for request in (
            self.rule(networks=["x"]),
            self.rule(networks=["10.0.0.1/8"]),
            self.rule(networks=["10.0.0.0/8; drop"]),
            self.rule(networks=["fe80::%x drop\n"]),
            self.rule(networks=["10.0.0.0/8", "10.1.0.0/16"]),
            self.rule(networks=["fd00::/8", "10.0.0.0/8", "fd00::/9"]),
            self.rule(networks=["10.0.0.0/8"] * (MAX_NETWORKS + 1)),
            self.rule(ports=ports(1, 1, 1)),
            self.rule(ports=ports(6, 0, 1)),
            self.rule(ports=ports(6, 2, 1)),
            self.rule(ports=ports(6, 1, 65536)),
        ):
            self.assertRaises(InvalidArgument, as_firewall, request)

    def test_the_nodes_address_is_as_packets_have_it(self) -> None:
        for host, address in (
            ("10.0.0.1",) * 2,
            ("::ffff:10.0.0.1", "10.0.0.1"),
            ("fe80::1%eth0", "fe80::1"),
        ):
            self.assertEqual(node_address(host), address)
