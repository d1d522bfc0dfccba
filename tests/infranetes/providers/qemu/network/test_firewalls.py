# SPDX-License-Identifier: Apache-2.0
"""Pods' firewalls on the node, on this machine's kernel: real packets between namespaces on the bridge."""

from __future__ import annotations

import secrets
import subprocess
from ipaddress import ip_network

from infranetes_common.pod_firewall import OPEN, PodFirewall, Ports
from tests.infranetes.providers.qemu.network.firewall_case import (
    NODE,
    OUTSIDE,
    OUTSIDE_OF_NODE,
    FirewallCase,
    allowed,
    blocking,
)
from tests.support.pod_namespaces import Datagrams, ping, refused, sctp, udp

EVERYWHERE = ip_network("0.0.0.0/0")


class FirewallTests(FirewallCase):
    """What a firewall lets through."""

    async def test_a_pod_whose_firewall_is_not_known_is_closed_but_for_its_node(self) -> None:
        await self.firewalls.set(self.b.port, OPEN)
        await self.cannot_reach(self.a, self.b)
        await self.cannot_reach(self.b, self.a)
        await self.cannot_reach(self.a, self.outside)
        await self.cannot_reach(self.outside, self.a)
        await self.cannot_reach(self.a, self.node)
        await self.reaches(self.node, self.a)
        self.assertFalse(await blocking(udp, self.a, self.b, 5000, False, "255.255.255.255"))

    async def test_everyone_reaches_everyone_where_all_is_open(self) -> None:
        await self.open_all()
        for client, server in ((self.a, self.b), (self.a, self.outside), (self.outside, self.a),
                               (self.a, self.node), (self.node, self.a), (self.a, self.a)):  # fmt: skip
            await self.reaches(client, server)
            self.assertTrue(await blocking(ping, client, server, True))
        self.assertTrue(await blocking(udp, self.a, self.b, 5000, True, "255.255.255.255"))

    async def test_ingress_is_for_those_that_are_named(self) -> None:
        await self.open_all()
        await self.set(self.a, ingress=[allowed("10.221.0.6/32")])
        await self.reaches(self.b, self.a)
        await self.cannot_reach(self.c, self.a)
        await self.cannot_reach(self.outside, self.a)
        await self.reaches(self.node, self.a)
        await self.reaches(self.a, self.c)
        await self.reaches(self.a, self.outside)
        self.assertFalse(await blocking(ping, self.c, self.a, False))
        self.assertTrue(await blocking(ping, self.b, self.a, True))
        self.assertFalse(await blocking(udp, self.b, self.a, 5000, False, "255.255.255.255"))
        await self.set(self.a, ingress=[allowed(f"{OUTSIDE}/32")])
        await self.reaches(self.outside, self.a)
        await self.cannot_reach(self.b, self.a)

    async def test_egress_is_to_those_that_are_named(self) -> None:
        await self.open_all()
        await self.set(self.a, egress=[allowed("10.221.0.6/32", "198.18.0.0/15")])
        await self.reaches(self.a, self.b)
        await self.reaches(self.a, self.outside)
        await self.reaches(self.a, self.a)
        await self.cannot_reach(self.a, self.c)
        await self.cannot_reach(self.a, self.node)
        await self.reaches(self.c, self.a)
        await self.reaches(self.node, self.a)
        await self.reaches(self.outside, self.a)
        self.assertFalse(await blocking(ping, self.a, self.c, False))
        self.assertFalse(await blocking(ping, self.a, self.node, False))
        await self.set(self.a, egress=[allowed(f"{NODE}/32")])
        await self.reaches(self.a, self.node)
        await self.cannot_reach(self.a, self.outside)

    async def test_all_networks_together_are_everyone(self) -> None:
        await self.open_all()
        await self.set(self.a, ingress=[allowed("0.0.0.0/0")], egress=[allowed("0.0.0.0/0")])
        await self.reaches(self.a, self.outside)
        await self.reaches(self.c, self.a)

    async def test_both_ends_have_to_agree(self) -> None:
        await self.set(self.a, egress=[allowed("10.221.0.6/32")], ingress=[])
        for ingress, agreed in (
            ([], False),
            ([allowed("10.221.0.7/32")], False),
            ([allowed("10.221.0.5/32")], True),
        ):
            await self.set(self.b, ingress=ingress, egress=[])
            await (self.reaches if agreed else self.cannot_reach)(self.a, self.b)
            await self.cannot_reach(self.b, self.a)

    async def test_ports_are_of_a_protocol_and_from_the_first_to_the_last(self) -> None:
        await self.open_all()
        ports = (
            Ports("SCTP", 7000, 7000),
            Ports("TCP", 80, 80),
            Ports("TCP", 8000, 8010),
            Ports("UDP", 53, 53),
        )
        client, server = self.a, self.b
        tcp = {
            80: True,
            8000: True,
            8010: True,
            8005: True,
            7999: False,
            8011: False,
            53: False,
            20480: False,
        }
        for pod, firewall in (
            (server, PodFirewall(ingress=(allowed("10.221.0.5/32", ports=ports),))),
            (client, PodFirewall(egress=(allowed("10.221.0.6/32", ports=ports),))),
        ):
            await self.open_all()
            await self.firewalls.set(pod.port, firewall)
            for port, there in tcp.items():
                await (self.reaches if there else self.cannot_reach)(client, server, port)
            for port, there in ((53, True), (80, False), (7000, False), (13568, False)):
                self.assertEqual(await blocking(udp, client, server, port, there), there, f"UDP {port}")
            for port, there in ((7000, True), (80, False), (53, False)):
                self.assertEqual(await blocking(sctp, client, server, port, there), there, f"SCTP {port}")
            self.assertFalse(await blocking(ping, client, server, False))

    async def test_what_two_rules_allow_adds_up(self) -> None:
        await self.open_all()
        web, dns = (Ports("TCP", 80, 80),), (Ports("TCP", 53, 53),)
        await self.set(
            self.a, ingress=[allowed("10.221.0.6/32", ports=web), allowed("10.221.0.0/24", ports=dns)]
        )
        await self.reaches(self.b, self.a, 80)
        await self.reaches(self.b, self.a, 53)
        await self.reaches(self.c, self.a, 53)
        await self.cannot_reach(self.c, self.a, 80)

    async def test_answers_and_errors_come_back_through_a_closed_firewall(self) -> None:
        await self.open_all()
        await self.set(self.a, ingress=[], egress=[allowed("10.221.0.6/32", f"{OUTSIDE}/32")])
        await self.set(self.b, ingress=[allowed("10.221.0.5/32")], egress=[])
        for server in (self.b, self.outside):
            talk = await blocking(Datagrams, self.a, server, 5000)
            self.addCleanup(talk.end)
            self.assertTrue(await blocking(talk.there, True))
            self.assertTrue(await blocking(talk.back, True))
            self.assertTrue(await blocking(refused, self.a, server, 5999, True))
        await self.cannot_reach(self.b, self.a)

    def tables(self) -> set[str]:
        """Return the tables of this bridge; other tests with tables run at the same time."""
        listed = subprocess.check_output(["nft", "list", "tables"], text=True)
        return {line for line in listed.splitlines() if self.bridge in line}

    async def test_thousands_of_networks_are_one_set(self) -> None:
        await self.open_all()
        many = [
            f"172.{16 + number // 256}.{number % 256}.{2 * last}/32"
            for number in range(40)
            for last in range(128)
        ]
        began = self.tables()
        await self.set(self.a, ingress=[allowed(*many, "10.221.0.6/32")])
        self.assertEqual(self.tables(), began)
        await self.reaches(self.b, self.a)
        await self.cannot_reach(self.c, self.a)
        listed = subprocess.check_output(
            [
                "nft",
                "--terse",
                "list",
                "chain",
                "ip",
                f"infranetes_{self.bridge}_firewalls",
                f"ingress-{self.a.port.tap}",
            ]
        )
        self.assertEqual(listed.count(b"accept"), 2)


class TranslatedTests(FirewallCase):
    """Addresses that the node translates, as kube-proxy does."""

    async def test_egress_is_judged_once_a_services_address_is_translated(self) -> None:
        await self.open_all()
        await self.translate("198.51.100.10", f"{self.b.address}")
        await self.translate("198.51.100.11", OUTSIDE)
        await self.translate("198.51.100.12", NODE)
        for service, server in (
            ("198.51.100.10", self.b),
            ("198.51.100.11", self.outside),
            ("198.51.100.12", self.node),
        ):
            await self.set(self.a, egress=[allowed(f"{server.address}/32")])
            await self.reaches(self.a, server, to=service)
            await self.set(self.a, egress=[allowed(f"{service}/32")])
            await self.cannot_reach(self.a, server, to=service)
        await self.set(self.a, egress=[allowed(f"{self.b.address}/32")])
        await self.set(self.b, ingress=[allowed(f"{self.c.address}/32")])
        await self.cannot_reach(self.a, self.b, to="198.51.100.10")
        await self.set(self.b, ingress=[allowed(f"{self.a.address}/32")])
        await self.reaches(self.a, self.b, to="198.51.100.10")

    async def test_ingress_is_from_who_really_connects_though_the_node_hides_it(self) -> None:
        await self.open_all()
        await self.translate(OUTSIDE_OF_NODE, self.a.address, masquerade=True)
        await self.set(self.a, ingress=[])
        await self.cannot_reach(self.outside, self.a, to=OUTSIDE_OF_NODE)
        await self.set(self.a, ingress=[allowed(f"{OUTSIDE}/32")])
        await self.reaches(self.outside, self.a, to=OUTSIDE_OF_NODE)

    async def translate(self, address: str, to: str, masquerade: bool = False) -> None:
        """Have the node redirect port 8000 of `address`."""
        table = f"inftest{secrets.token_hex(4)}"
        hide = f"ip daddr {to} tcp dport 8000 masquerade" if masquerade else ""
        script = f"""table ip {table} {{
            chain before {{
                type nat hook prerouting priority dstnat;
                ip daddr {address} tcp dport 8000 dnat to {to}
            }}
            chain after {{
                type nat hook postrouting priority 90;
                {hide}
            }}
        }}"""
        await blocking(subprocess.run, ["nft", "-f", "-"], input=script.encode(), check=True)
        self.addCleanup(subprocess.run, ["nft", "delete", "table", "ip", table], check=True)
