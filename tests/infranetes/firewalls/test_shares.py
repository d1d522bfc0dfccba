# SPDX-License-Identifier: Apache-2.0
"""The node's kernel has tables that pods share: no pod fills one, with and without NetworkPolicies."""

from __future__ import annotations

import socket
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from infranetes.firewalls import shares
from infranetes.providers.interface import Share
from tests.harness.needs import needs_programs
from tests.infranetes.providers.qemu.network.firewall_case import (
    NODE,
    OUTSIDE,
    SUBNET,
    FirewallCase,
    blocking,
)
from tests.support.pod_namespaces import Host, Machine, Pod, ip, ping, udp
from tests.support.segments import dccp_request, gre, sctp_init, syn

SHARE = 24
Packet = Callable[[str, str, int], bytes]  # of source, destination and a number
FAR = "198.19.221"  # a network behind the machine outside


class ShareCase(FirewallCase):
    """Pods that begin connections to a machine outside, with a small share of the connection table."""

    share = SHARE

    async def setUp(self) -> None:
        await super().setUp()
        await self.open_all()
        self.server = self.outside.socket(socket.SOCK_DGRAM)
        self.server.bind((OUTSIDE, 0))
        self.heard: set[str] = set()  # whose datagrams have come

    def begin(self, client: Machine, number: int) -> int:
        """Begin connections of UDP to the outside, each by one datagram. Return how many arrive."""
        for _ in range(number):
            client.socket(socket.SOCK_DGRAM).sendto(b"x", self.server.getsockname())
        # The kernel asks for a neighbour again after a second.
        self.server.settimeout(0.5 if client.address in self.heard else 3.0)
        found = 0
        while True:
            try:
                self.server.recv(1)
            except TimeoutError:
                return found
            found += 1
            self.server.settimeout(0.5)
            self.heard.add(client.address)


class ShareTests(ShareCase):
    """What one pod may begin."""

    async def test_a_pod_has_its_share_and_others_have_theirs(self) -> None:
        made = await self.connection(self.a, self.outside)
        self.assertEqual(await blocking(self.begin, self.a, 2 * SHARE), SHARE - 1)
        await self.cannot_reach(self.a, self.outside)
        self.assertFalse(await blocking(ping, self.a, self.node, False))
        if self.policies:  # otherwise the bridge may hand it on, and the node follows no connection
            self.assertFalse(await blocking(udp, self.a, self.b, 5000, False))
        for back in (False, True):
            self.assertTrue(await blocking(made.carries, True, back), "what there was goes on")
        refused = await self.network.refusals()
        self.assertEqual(list(refused), [self.a.address], "who was refused is known")
        self.assertGreater(refused[self.a.address][Share.CONNECTIONS], SHARE)
        await self.reaches(self.b, self.outside)
        await self.reaches(self.b, self.a)
        await self.reaches(self.node, self.a)
        await self.reaches(self.outside, self.a)

    async def test_the_share_is_not_given_anew_by_a_daemon_that_starts(self) -> None:
        self.assertEqual(await blocking(self.begin, self.a, SHARE), SHARE)
        await self.network.set_up(SUBNET, [self.a.port, self.b.port, self.c.port])
        self.assertEqual(await blocking(self.begin, self.a, SHARE), 0)
        self.assertEqual(await blocking(self.begin, self.b, SHARE), SHARE)

    @needs_programs("conntrack")
    async def test_what_has_ended_counts_no_more(self) -> None:
        self.assertEqual(await blocking(self.begin, self.a, SHARE), SHARE)
        await blocking(subprocess.run, ["conntrack", "-D", "-s", self.a.address], capture_output=True)
        self.assertGreater(await blocking(self.begin, self.a, SHARE), 0)

    @needs_programs("conntrack")
    async def test_the_next_pod_with_the_address_has_a_share_of_its_own(self) -> None:
        self.assertEqual(await blocking(self.begin, self.a, SHARE), SHARE)
        await self.network.forbid(self.a.port)
        await self.network.allow(self.a.port)
        await self.open_all()
        self.assertEqual(await blocking(self.begin, self.a, 2 * SHARE), SHARE)

    @needs_programs("conntrack")
    async def test_each_protocol_of_which_the_kernel_follows_connections_has_the_share(self) -> None:
        await blocking(ip, "route", "add", f"{FAR}.0/24", "via", OUTSIDE)
        await self.reaches(self.c, self.outside)  # the node has asked for its neighbour
        kinds = ((132, self.a, sctp_init), (33, self.b, dccp_request), (socket.IPPROTO_GRE, self.c, gre))
        for protocol, pod, made in kinds:

            def flood(protocol: int = protocol, pod: Pod = pod, made: Packet = made) -> int:
                with pod.socket(socket.SOCK_RAW, protocol) as sending:
                    for number in range(1, 4 * SHARE):
                        to = f"{FAR}.{number}"
                        sending.sendto(made(pod.address, to, number), (to, 0))
                shown = subprocess.check_output(
                    ["conntrack", "-L", "-s", pod.address], stderr=subprocess.DEVNULL
                )
                return sum(not line.startswith(b"tcp") for line in shown.splitlines())

            followed = await blocking(flood)
            self.assertGreater(followed, SHARE // 2, f"protocol {protocol}: the flood is followed")
            self.assertLessEqual(followed, SHARE, f"protocol {protocol}")
            await self.cannot_reach(pod, self.outside)
        refused = await self.network.refusals()
        self.assertEqual(set(refused), {each.address for each in (self.a, self.b, self.c)})
        await self.reaches(self.node, self.a)

    async def test_an_address_that_no_pod_has_takes_no_neighbour(self) -> None:
        def send(client: Machine) -> bytes:
            with client.socket(socket.SOCK_DGRAM) as sending:
                for number in range(100, 200):
                    sending.sendto(b"x", (f"10.221.0.{number}", 5000))
            shown = subprocess.run(["ip", "neighbour", "show", "dev", self.bridge], capture_output=True)
            return shown.stdout

        for network in ("10.221.0.64/26", "10.221.0.128/25"):  # otherwise the VM asks for each address itself
            await blocking(ip, "-n", self.a.name, "route", "replace", network, "via", NODE)
        for client in (self.a, self.outside):
            self.assertNotIn(b"10.221.0.1", await blocking(send, client))
        await self.network.forbid(self.b.port)
        await self.cannot_reach(self.a, self.b)

    @needs_programs("conntrack")
    async def test_what_is_half_open_is_soon_forgotten(self) -> None:
        """Also where one end is the node, which takes connections of pods, and makes some to them."""
        for machine in (self.a, self.outside):  # their kernels know nothing of these connections
            silent = (
                "table ip silent { chain out { type filter hook output priority 0; tcp flags rst drop; }; }"
            )
            await blocking(subprocess.run, ["ip", "netns", "exec", machine.name, "nft", silent], check=True)
        with self.node.socket(socket.SOCK_STREAM) as listening:
            listening.bind((NODE, 5001))
            listening.listen()
            pairs: list[tuple[Host, Host]] = [
                (self.a, self.node),
                (self.a, self.outside),
                (self.node, self.a),
                (self.outside, self.a),
            ]
            for port, (client, to) in enumerate(pairs, 5001):
                await blocking(self.begin_tcp, client, to, port)
                shown = await blocking(
                    subprocess.check_output, ["conntrack", "-L", "-p", "tcp", "--orig-port-dst", str(port)]
                )
                self.assertIn(b"SYN_", shown)
                self.assertLessEqual(int(shown.split()[2]), 20, shown)

    def begin_tcp(self, client: Host, to: Host, port: int) -> None:
        """Send the first segment of a connection alone."""
        with client.socket(socket.SOCK_RAW, socket.IPPROTO_TCP) as sending:
            sending.sendto(syn(client.address, to.address, port), (to.address, 0))


class TogetherTests(ShareCase):
    """Pods that have less together than each could have alone."""

    together = SHARE + SHARE // 2

    @needs_programs("conntrack")
    async def test_all_pods_together_leave_a_part_of_the_table_to_the_node(self) -> None:
        made = await self.connection(self.c, self.outside)
        begun = [await blocking(self.begin, each, SHARE - 1) for each in (self.a, self.b)]
        self.assertEqual(begun[0], SHARE - 1)
        self.assertLess(sum(begun), self.together)
        self.assertGreater(begun[1], 0)
        await self.cannot_reach(self.c, self.outside)
        self.assertTrue(await blocking(made.carries, True), "what there was goes on")
        self.assertEqual(await self.network.refusals(), {}, "no pod went beyond its own share")
        await self.reaches(self.node, self.a)
        await self.reaches(self.outside, self.a)
        await blocking(subprocess.run, ["conntrack", "-D", "-s", self.a.address], capture_output=True)
        await self.reaches(self.c, self.outside)

    async def test_of_the_kernels_table_a_quarter_is_the_nodes(self) -> None:
        proc_sys = Path(self.mktemp())
        entries = proc_sys / "net/netfilter/nf_conntrack_max"
        self.assertEqual(shares.together(proc_sys), 196_608, "where the kernel does not tell its size")
        entries.parent.mkdir(parents=True)
        entries.write_text("65536\n")
        self.assertEqual(shares.together(proc_sys), 49_152)


class OrdinaryShareTests(FirewallCase):
    """An ordinary share of the connection table."""

    async def test_a_connection_of_many_costs_the_kernel_little_more_than_the_first(self) -> None:
        """While it counts a pod's connections, a processor does nothing else."""
        await self.open_all()

        def begin(first: int, number: int) -> float:
            began = time.thread_time()
            with self.a.socket(socket.SOCK_RAW, socket.IPPROTO_UDP) as sending:
                for port in range(first, first + number):
                    sending.sendto(struct.pack("!HHHH", 5000, port, 8, 0), (OUTSIDE, 0))
            return time.thread_time() - began

        few = await blocking(begin, 1000, 1000)
        await blocking(begin, 2000, 12000)
        many = await blocking(begin, 14000, 1000)
        self.assertLess(many, 12 * few + 0.1)

    async def test_a_pod_that_looks_for_machines_beyond_fills_no_neighbour_table(self) -> None:
        """Each address of the node's own networks takes an entry, whether a machine has it or not."""

        def look(client: Machine, begin: int) -> int:
            with client.socket(socket.SOCK_DGRAM) as sending:
                for number in range(begin, begin + 120):
                    sending.sendto(b"x", (f"198.18.221.{number}", 5000))
            shown = subprocess.run(["ip", "neighbour", "show", "dev", self.uplink], capture_output=True)
            return len(shown.stdout.splitlines())

        await self.open_all()
        for begin in (3, 123, 3):
            self.assertLess(await blocking(look, self.a, begin), 80)
        await self.reaches(self.a, self.outside)  # it has answered
        await self.reaches(self.c, self.outside)
        before = await blocking(look, self.a, 123)
        self.assertGreater(await blocking(look, self.b, 123), before)


class WithoutPoliciesTests(ShareTests):
    """Where no pod has a firewall."""

    policies = False


class OrdinaryShareWithoutPoliciesTests(OrdinaryShareTests):
    """Where no pod has a firewall."""

    policies = False
