# SPDX-License-Identifier: Apache-2.0
"""VMs that know nothing of Kubernetes reach Services by the node, with NetworkPolicies and without.

The node's own rules are tried, and such as kube-proxy's; where the kernel passes bridged packets by the
tables of IP (br_netfilter), and where not.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import attrs

from infranetes_common.reactors import installed
from infranetes_common.service_proxy.kernel import Kernel
from infranetes_common.service_proxy.proxy import ServiceProxy, Update, Version
from infranetes_common.service_proxy.rules import Key, Rule, Target
from infranetes_common.service_proxy.script import of_bridge
from tests.infranetes.providers.qemu.network.firewall_case import FirewallCase, blocking
from tests.support import frames
from tests.support.pod_namespaces import Host, Pod

reactor = installed()
SERVICE, OTHER, UNUSED = "10.96.0.10", "10.96.0.11", "10.96.0.99"
PORT = 8000
CALL_IPTABLES = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")


def nft(script: str) -> str:
    done = subprocess.run(["nft", "-f", "-"], input=script, text=True, check=True, capture_output=True)
    return done.stdout


class KubeProxyTests(FirewallCase):
    """Rules such as kube-proxy's, in a table of their own."""

    filtered = True  # by br_netfilter

    async def setUp(self) -> None:
        if CALL_IPTABLES.exists():
            before = CALL_IPTABLES.read_text()
            self.addCleanup(CALL_IPTABLES.write_text, before)
            CALL_IPTABLES.write_text("1" if self.filtered else "0")
        await super().setUp()
        if self.policies:
            await self.open_all()

    async def pod(self, letter: str, address: str) -> Pod:
        """Make a pod; the first is one that knows nothing of Kubernetes."""
        made = await blocking(Pod, f"{self.bridge}000{letter}", address, "10.221.0.1")
        self.addCleanup(made.end)
        made.port = attrs.evolve(made.port, served=letter == "a")
        await self.network.allow(made.port)
        await self.network.join(made.port)
        return made

    async def serve(self, services: Mapping[str, list[str]]) -> None:
        """Have Services, by their addresses, with port 80 and these endpoints."""
        table = "infranetes-test-proxy"
        self.addCleanup(nft, f"table ip {table} {{}}\ndelete table ip {table}\n")
        rules = "".join(
            f"ip daddr {address} tcp dport 80 dnat to {endpoint}:{PORT}\n"
            for address, endpoints in services.items()
            for endpoint in endpoints
        )
        nft(
            f"""table ip {table} {{}}
            delete table ip {table}
            table ip {table} {{
                chain nat-prerouting {{
                    type nat hook prerouting priority dstnat
                    {rules}
                }}
            }}"""
        )

    async def asked(self, server: Host) -> str:
        """Connect to the Service, exchange data, and return the client as the server sees it."""

        def ask() -> str:
            with server.socket(socket.SOCK_STREAM) as listening, self.a.socket(socket.SOCK_STREAM) as client:
                listening.bind(("0.0.0.0", PORT))
                listening.listen()
                client.settimeout(5.0)
                listening.settimeout(5.0)
                client.connect((SERVICE, 80))
                accepted, (address, _) = listening.accept()
                with accepted:
                    accepted.settimeout(5.0)
                    client.sendall(b"asked")
                    assert accepted.recv(100) == b"asked"
                    accepted.sendall(b"told")
                    assert client.recv(100) == b"told"
                return str(address)

        return await blocking(ask)

    async def test_a_machine_outside_is_reached(self) -> None:
        await self.serve({SERVICE: [self.outside.address]})
        await self.asked(self.outside)

    async def test_the_node_is_reached(self) -> None:
        await self.serve({SERVICE: [self.node.address]})
        self.assertEqual(await self.asked(self.node), self.a.address)

    async def test_a_neighbour_is_reached_and_sees_the_pod(self) -> None:
        await self.serve({SERVICE: [self.b.address]})
        self.assertEqual(await self.asked(self.b), self.a.address)

    async def test_it_reaches_itself(self) -> None:
        await self.serve({SERVICE: [self.a.address]})
        self.assertEqual(await self.asked(self.a), self.node.address)


class UnfilteredTests(KubeProxyTests):
    filtered = False


class WithoutPoliciesTests(KubeProxyTests):
    policies = False


class UnfilteredWithoutPoliciesTests(KubeProxyTests):
    filtered, policies = False, False


class OwnProxyTests(KubeProxyTests):
    """The node's own rules."""

    async def setUp(self) -> None:
        await super().setUp()
        self.tables = of_bridge(self.bridge)
        self.proxy = ServiceProxy(Kernel(reactor, tables=self.tables))
        self.addCleanup(nft, self.tables.removal(4))

    async def serve(self, services: Mapping[str, list[str]], seconds: int = 0) -> None:
        rules = {
            Key(4, address, "tcp", 80): Rule(
                tuple(Target(each, PORT) for each in endpoints), cluster_ip=True, affinity_seconds=seconds
            )
            for address, endpoints in services.items()
        }
        await self.proxy.apply(Update(Version("table", 1), rules, all=True, ranges=["10.96.0.0/16"]))

    def thd_error(self, client: Host, address: str, port: int) -> type[BaseException] | None:
        with client.socket(socket.SOCK_STREAM) as connecting:
            connecting.settimeout(1.0)
            try:
                connecting.connect((address, port))
            except OSError as error:
                return type(error)
            return None

    async def test_what_no_service_has_is_refused_or_dropped(self) -> None:
        await self.serve({SERVICE: [self.b.address], OTHER: []})
        for address, port, expected in (
            (OTHER, 80, ConnectionRefusedError),
            (SERVICE, 81, ConnectionRefusedError),
            (UNUSED, 80, TimeoutError),
        ):
            self.assertIs(await blocking(self.thd_error, self.a, address, port), expected, (address, port))

    async def test_endpoints_share_the_connections_and_a_client_may_keep_its_own(self) -> None:
        endpoints = [self.b.address, self.c.address]
        await self.serve({SERVICE: endpoints})
        self.assertEqual(await blocking(self.thd_reached, 40), set(endpoints))
        await self.serve({SERVICE: endpoints}, seconds=60)
        self.assertEqual(len(await blocking(self.thd_reached, 20)), 1)

    def thd_reached(self, times: int) -> set[str]:
        """Return the endpoints that this many connections reach."""
        servers = {each.address: each.socket(socket.SOCK_STREAM) for each in (self.b, self.c)}
        for server in servers.values():
            server.bind(("0.0.0.0", PORT))
            server.listen()
            server.setblocking(False)
        reached = set()
        for _ in range(times):
            with self.a.socket(socket.SOCK_STREAM) as client:
                client.settimeout(5.0)
                client.connect((SERVICE, 80))
                for address, server in servers.items():
                    try:
                        server.accept()[0].close()
                    except BlockingIOError:
                        continue
                    reached.add(address)
        for server in servers.values():
            server.close()
        return reached

    async def test_no_mark_stays_on_packets(self) -> None:
        """Marks mean something on a node: one of them is the daemon's."""
        await self.serve({SERVICE: [self.outside.address] * 1 + [f"198.18.221.{n}" for n in range(10, 60)]})
        nft(
            f"""table ip infranetes-test-marks {{}}
            delete table ip infranetes-test-marks
            table ip infranetes-test-marks {{
                counter marked {{ }}
                chain forward {{
                    type filter hook forward priority 0
                    iifname "{self.bridge}" meta mark != 0 counter name marked
                }}
            }}"""
        )
        self.addCleanup(nft, "delete table ip infranetes-test-marks\n")
        for _ in range(10):
            await blocking(self.thd_error_at_once)
        counted = subprocess.run(["nft", "list", "counters", "table", "ip", "infranetes-test-marks"],
                                 check=True, capture_output=True, text=True).stdout  # fmt: skip
        self.assertIn("packets 0 bytes 0", counted)

    def thd_error_at_once(self) -> None:
        with self.a.socket(socket.SOCK_STREAM) as connecting:
            connecting.setblocking(False)
            connecting.connect_ex((SERVICE, 80))


class OwnProxyUnfilteredTests(OwnProxyTests):
    filtered = False


class OwnProxyWithoutPoliciesTests(OwnProxyTests):
    policies = False


class OwnProxyUnfilteredWithoutPoliciesTests(OwnProxyTests):
    filtered, policies = False, False


class ReflectionTests(FirewallCase):
    """A port by which packets may go out that came in by it."""

    policies = False

    async def test_what_is_for_all_does_not_come_back(self) -> None:
        served = attrs.evolve(self.a.port, served=True)
        await self.network.allow(served)
        await self.network.join(served)
        own = await blocking(_packets, self.a)
        other = await blocking(_packets, self.b)
        self.addCleanup(own.close)
        self.addCleanup(other.close)
        mark = b"everybody hears this"
        packet = frames.udp(self.a.address, "255.255.255.255", mark)
        own.send(frames.ethernet(frames.BROADCAST, self.a.port.mac, frames.IPV4, packet))
        self.assertEqual(await blocking(_heard, other, mark), 1)
        self.assertEqual(await blocking(_heard, own, mark), 0)


def _packets(pod: Pod) -> socket.socket:
    from infranetes_common.network_namespaces import thd_in_namespace

    def opened() -> socket.socket:
        made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        made.setsockopt(263, 23, 1)  # not what it sends itself
        made.bind(("eth0", 3))
        made.settimeout(0.3)
        return made

    return thd_in_namespace(pod.name, opened)


def _heard(card: socket.socket, mark: bytes) -> int:
    found = 0
    try:
        while True:
            found += mark in card.recv(2000)
    except TimeoutError:
        return found
