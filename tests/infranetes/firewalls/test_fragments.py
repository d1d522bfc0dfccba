# SPDX-License-Identifier: Apache-2.0
"""The node's kernel has one memory for fragments: no pod fills it, with and without NetworkPolicies."""

from __future__ import annotations

import socket
from pathlib import Path

from infranetes.firewalls import fragments as module
from infranetes.firewalls.fragments import MEMORY
from infranetes.providers.interface import Share
from tests.infranetes.providers.qemu.network.firewall_case import (
    NODE,
    OUTSIDE,
    SUBNET,
    FirewallCase,
    blocking,
)
from tests.support.frames import fragment
from tests.support.frames import udp as udp_packet
from tests.support.pod_namespaces import fragments, large


def used() -> int:
    """Return how many bytes of fragments the node's kernel has."""
    [line] = [each for each in Path("/proc/net/sockstat").read_text().splitlines() if each[:5] == "FRAG:"]
    return int(line.split()[-1])


class FragmentTests(FirewallCase):
    """Pods that reach everyone."""

    async def setUp(self) -> None:
        await super().setUp()
        await self.open_all()

    async def test_what_never_becomes_whole_takes_only_the_share_of_its_pod(self) -> None:
        for datagrams, pieces, size in ((2500, 1, 1480), (3, 5000, 8), (200, 60, 1000)):
            for to in (OUTSIDE, NODE, self.c.address):
                await blocking(fragments, self.a, to, datagrams, pieces, size)
            for client, server in ((self.b, self.outside), (self.outside, self.b), (self.b, self.node),
                                   (self.node, self.b), (self.b, self.c)):  # fmt: skip
                self.assertEqual(await blocking(large, client, server, 3), 3)
            self.assertLess(used(), 4 << 20)
        await self.reaches(self.a, self.outside)
        self.assertEqual(await blocking(large, self.a, self.outside, 1), 0)
        await self.network.set_up(SUBNET, [self.a.port, self.b.port, self.c.port])
        self.assertEqual(await blocking(large, self.a, self.outside, 1), 0, "a daemon that starts")
        self.assertEqual(list(await self.network.refusals()), [self.a.address])
        await self.network.forbid(self.a.port)
        await self.network.allow(self.a.port)
        self.assertEqual(await self.network.refusals(), {})
        await self.open_all()
        self.assertEqual(await blocking(large, self.a, self.outside, 1), 1, "the next pod with the address")

    async def test_what_becomes_whole_has_no_limit(self) -> None:
        memory = Path("/proc/sys/net/ipv4/ipfrag_high_thresh").read_text()
        self.assertGreaterEqual(int(memory), MEMORY, "room for the worst of many pods")
        for size in (4000, 65507):
            self.assertEqual(await blocking(large, self.a, self.outside, 200, size), 200)
        await self.network.set_up(SUBNET, [self.a.port, self.b.port, self.c.port])
        self.assertEqual(await blocking(large, self.a, self.outside, 20_000), 20_000)
        self.assertEqual(await self.network.refusals(), {})

    async def test_where_its_datagrams_find_no_room_in_the_table_they_are_refused(self) -> None:
        self.patch(module, "_MOST_DATAGRAMS", 8)
        await self.network.forbid(self.a.port)
        await self.network.allow(self.a.port)
        await self.open_all()
        await blocking(fragments, self.a, OUTSIDE, 1000, 1, 1480)
        refused = (await self.network.refusals())[self.a.address][Share.FRAGMENTS]
        self.assertGreaterEqual(refused, 1000 - 8)

    async def test_a_packet_of_the_same_identification_gives_no_room(self) -> None:
        def send() -> None:
            with self.a.socket(socket.SOCK_RAW, socket.IPPROTO_RAW) as sending:
                for number in range(1, 2000):
                    for packet in (fragment(self.a.address, OUTSIDE, number, 0, 1400),
                                   udp_packet(self.a.address, OUTSIDE, b"whole", number=number)):  # fmt: skip
                        sending.sendto(packet, (OUTSIDE, 0))

        await blocking(send)
        self.assertLess(used(), 1 << 20)


class WithoutPoliciesTests(FragmentTests):
    """Where no pod has a firewall."""

    policies = False
