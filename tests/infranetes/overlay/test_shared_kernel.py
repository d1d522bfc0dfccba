# SPDX-License-Identifier: Apache-2.0
"""What a VM in the overlay can't do to the node's kernel, and to what others hear of their connections.

It is root, so it sends whatever it likes from its pod's address. Policies are enforced or not.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from ipaddress import IPv4Address

from infranetes.providers.subnet import mac_of
from infranetes_common.overlay import NODE_MAC, VNI
from infranetes_common.pod_firewall import OPEN
from tests.harness.tools import need
from tests.infranetes.overlay.case import GATEWAY, INTERNET, OTHER_POD, PODS, TunnelCase
from tests.infranetes.overlay.test_firewalled_pods import Place, blocking
from tests.support import frames
from tests.support.frames import IPV4, ethernet
from tests.support.icmp import (
    EXCEEDED,
    PARAMETER,
    PORT,
    PROTOCOLS,
    QUENCH,
    REDIRECT,
    TOO_LARGE,
    UNREACHABLE,
    error,
    quoted,
)
from tests.support.pod_namespaces import Host, comes, large, udp
from tests.support.spaces import Space

SHARE = 64
SECRET = b"secret" * 20
_LOOPBACK = "for s in all infvx0; do echo 1 >/proc/sys/net/ipv4/conf/$s/route_localnet; done"


class SharedKernelTests(TunnelCase):
    """Without policies."""

    async def setUp(self) -> None:
        super().setUp()
        need("conntrack")
        self.config["connections"] = SHARE
        self.hostile, self.victim = (
            self.place(space, address) for space, address in zip(self.vms, PODS, strict=True)
        )
        self.by_node, self.beyond = self.place(self.node, GATEWAY), self.place(self.other, OTHER_POD)
        self.internet = self.place(self.vpc, INTERNET)
        await self.join(0, 1)
        if self.enforcing:
            overlay = await self.daemon()
            for id in self.found:
                await overlay.set_firewall(id, OPEN)

    def place(self, space: Space, address: str) -> Place:
        made = Place(space, address)
        self.addCleanup(made.end)
        return made

    async def wire(self) -> socket.socket:
        """Return a socket that sends frames into the hostile VM's tunnel, past what its own kernel does."""
        made = await blocking(self.vms[0].inside, lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
        self.addCleanup(made.close)
        made.bind(("pod0", 0))
        return made

    def begin(self, to: Sequence[str], number: int) -> None:
        """Begin connections of UDP from the hostile pod's address."""
        for each in to:
            for _ in range(number):
                with self.hostile.socket(socket.SOCK_DGRAM) as sending:
                    sending.bind((self.hostile.address, 0))
                    sending.sendto(b"x", (each, 5000))

    async def test_a_pod_has_its_share_of_the_nodes_connections(self) -> None:
        await blocking(self.begin, [INTERNET, GATEWAY], 2 * SHARE)
        shown = await blocking(self.node.said, "conntrack", "-L", "-s", PODS[0])
        self.assertLessEqual(shown.count(f"src={PODS[0]}"), SHARE)
        limits = await blocking(
            self.node.said, "nft", "list", "chain", "ip", "infranetes_infvx0_shares", "share"
        )
        self.assertIn("add @begun-together", limits, "all pods together have a limit too")
        for client, server in (
            (self.victim, self.beyond),
            (self.beyond, self.hostile),
            (self.by_node, self.victim),
        ):
            self.assertTrue(await blocking(udp, client, server, 5001, True))
        overlay = await self.daemon()
        await overlay.remove("pod0")
        shown = await blocking(self.node.said, "conntrack", "-L", "-s", PODS[0])
        self.assertEqual(shown, "", "the next pod with the address has a share of its own")

    async def test_made_up_addresses_fill_no_neighbour_table(self) -> None:
        self.config["connections"] = 16384
        await self.daemon()
        await blocking(self.begin, [f"192.0.2.{number}" for number in range(20, 250)], 1)
        shown = await blocking(self.node.said, "ip", "neighbour", "show", "dev", "eth0")
        self.assertLess(len(shown.splitlines()), 90)

    async def test_fragments_that_never_become_whole_do_not_fill_the_nodes_memory(self) -> None:
        self.config["connections"] = 16384
        await self.daemon()
        wire = await self.wire()
        for to in (INTERNET, GATEWAY):
            for number in range(1, 3000):
                packet = frames.fragment(PODS[0], to, number, 0, 1000)
                wire.send(ethernet(NODE_MAC, mac_of(IPv4Address(PODS[0])), IPV4, packet))
        for client, server in ((self.victim, self.beyond), (self.by_node, self.victim)):
            self.assertEqual(await blocking(large, client, server, 3), 3)
            self.assertEqual(await blocking(large, server, client, 3), 3)
        shown = await blocking(self.node.said, "cat", "/proc/net/sockstat")
        self.assertLess(int(shown.split("FRAG: inuse")[1].split()[2]), 1 << 20)

    async def test_no_error_is_about_others_connections(self) -> None:
        kinds = ((UNREACHABLE, PORT), (UNREACHABLE, TOO_LARGE), (EXCEEDED, 0), (PARAMETER, 0))
        for client, server in ((self.beyond, self.victim), (self.by_node, self.victim)):
            source, to = await blocking(self.ends, client, server)
            for end, ends in ((client, (source, to)), (server, (to, source))):
                quotes = [quoted(*ends, each, SECRET) for each in PROTOCOLS]
                messages = [error(kind, code, quote, 552) for kind, code in kinds for quote in quotes]
                self.assertFalse(await blocking(self.arrive, messages, end, False), end.address)

    async def test_nor_is_there_a_redirect_or_quench(self) -> None:
        for other in (self.beyond, self.by_node):
            source, to = await blocking(self.ends, other, self.hostile)
            quote = quoted(source, to, socket.IPPROTO_UDP, SECRET)
            self.assertTrue(
                await blocking(self.arrive, [error(UNREACHABLE, TOO_LARGE, quote, 1000)], other, True)
            )
            messages = [error(kind, 1, quote) for kind in (REDIRECT, QUENCH)]
            self.assertFalse(await blocking(self.arrive, messages, other, False), other.address)

    async def test_the_nodes_loopback_address_is_not_reached(self) -> None:
        await blocking(self.node.said, "sh", "-c", _LOOPBACK)
        with self.by_node.socket(socket.SOCK_DGRAM) as listening:
            listening.bind(("0.0.0.0", 5002))
            listening.settimeout(5.0)
            wire = await self.wire()
            for to, content in (("127.0.0.1", b"lie"), (GATEWAY, b"honest")):
                packet = frames.udp(PODS[0], to, content, (1000, 5002))
                wire.send(ethernet(NODE_MAC, mac_of(IPv4Address(PODS[0])), IPV4, packet))
            self.assertEqual(await blocking(listening.recv, 9), b"honest")

    async def test_a_tunnel_within_the_tunnel_leads_nowhere(self) -> None:
        with (
            self.by_node.socket(socket.SOCK_DGRAM) as listening,
            self.hostile.socket(socket.SOCK_DGRAM) as sending,
        ):
            listening.bind((GATEWAY, 5002))
            listening.settimeout(5.0)
            sending.bind((self.hostile.address, 0))
            inner = frames.udp(self.victim.address, GATEWAY, b"lie", (1000, 5002))
            frame = ethernet(NODE_MAC, mac_of(IPv4Address(self.victim.address)), IPV4, inner)
            sending.sendto(struct.pack("!II", 1 << 27, VNI << 8) + frame, (GATEWAY, 2476))
            sending.sendto(b"honest", (GATEWAY, 5002))
            self.assertEqual(await blocking(listening.recv, 9), b"honest")

    def ends(self, client: Host, server: Host) -> tuple[tuple[str, int], tuple[str, int]]:
        """Return the addresses and ports of two that have exchanged datagrams."""
        there, here = server.socket(socket.SOCK_DGRAM), client.socket(socket.SOCK_DGRAM)
        there.bind((server.address, 0))
        here.bind((client.address, 0))
        here.connect(there.getsockname())
        there.settimeout(5.0)
        here.settimeout(5.0)
        here.send(b"x")
        _, sender = there.recvfrom(10)
        there.sendto(b"y", sender)
        here.recv(10)
        return sender, there.getsockname()

    def arrive(self, messages: Sequence[bytes], to: Host, expected: bool) -> bool:
        """Return whether one of the hostile VM's messages arrives."""
        with to.socket(socket.SOCK_RAW, socket.IPPROTO_ICMP) as hearing:
            with self.hostile.socket(socket.SOCK_RAW, socket.IPPROTO_ICMP) as sending:
                sending.bind((self.hostile.address, 0))
                for each in messages:
                    sending.sendto(each, (to.address, 0))
            return comes(hearing, lambda packet: SECRET in packet, expected)


class SharedKernelWithPoliciesTests(SharedKernelTests):
    """With policies that let everything through."""

    enforcing = True
