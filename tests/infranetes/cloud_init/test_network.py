# SPDX-License-Identifier: Apache-2.0
"""A VM's network for its guest."""

from __future__ import annotations

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.cloud_init.document import Resolvers
from infranetes.cloud_init.network import network_data, version_2
from infranetes.providers.machine_annotations import NetworkConfig
from infranetes_common.identity import Network, Route

MAC = "52:54:00:ab:cd:ef"
BRIDGED = Network(MAC.upper(), "10.88.0.7/16", "10.88.0.1")
# As Calico's CNI has it: a router that is on the link, and IPv6.
ROUTED = Network(
    MAC, "10.1.2.3/32", "", 1450,
    routes=(
        Route("169.254.1.1/32"), Route("0.0.0.0/0", "169.254.1.1", onlink=True),
        Route("fd00:1::/64"), Route("::/0", "fe80::1", onlink=True),
    ),
    more=("fd00:1::7/64",),
)  # fmt: skip
DNS = Resolvers(("10.96.0.10", "fd00::a"), ("default.svc.cluster.local", "svc.cluster.local"))


class Version2Tests(SynchronousTestCase):
    def card(self, network: Network, config: NetworkConfig) -> object:
        found = version_2(network, config, DNS)
        self.assertEqual(found["version"], 2)
        cards = found["ethernets"]
        assert isinstance(cards, dict)
        (card,) = cards.values()
        self.assertEqual(card.pop("match"), {"macaddress": MAC})
        return card

    def test_dhcp_says_all_that_there_is_in_ipv4(self) -> None:
        self.assertEqual(self.card(BRIDGED, NetworkConfig.DHCP), {"dhcp4": True})

    def test_what_dhcp_can_not_say_is_said_beside_it(self) -> None:
        self.assertEqual(
            self.card(ROUTED, NetworkConfig.DHCP),
            {
                "dhcp4": True,
                "mtu": 1450,
                "addresses": ["fd00:1::7/64"],
                "gateway6": "fe80::1",
            },
        )

    def test_an_image_without_dhcp_gets_addresses_routes_and_resolvers(self) -> None:
        self.assertEqual(
            self.card(BRIDGED, NetworkConfig.STATIC),
            {
                "addresses": ["10.88.0.7/16"],
                "routes": [{"to": "0.0.0.0/0", "via": "10.88.0.1"}],
                "nameservers": {"addresses": list(DNS.servers), "search": list(DNS.searches)},
            },
        )

    def test_a_router_that_only_the_link_leads_to_is_said_to_be_on_it(self) -> None:
        plain = attrs.evolve(ROUTED, routes=(Route("169.254.1.1/32"), Route("0.0.0.0/0", "169.254.1.1")))
        for network in (plain, ROUTED):
            card = self.card(network, NetworkConfig.STATIC)
            assert isinstance(card, dict)
            default = {"to": "0.0.0.0/0", "via": "169.254.1.1", "on-link": True}
            self.assertEqual(card["routes"], [default])
            self.assertEqual(card["addresses"], ["10.1.2.3/32", "fd00:1::7/64"])

    def test_other_subnets_on_the_link_are_routes(self) -> None:
        network = Network(MAC, "10.0.0.2/24", "", routes=(Route("10.0.0.0/24"), Route("10.9.0.0/16")))
        card = self.card(network, NetworkConfig.STATIC)
        assert isinstance(card, dict)
        self.assertEqual(card["routes"], [{"to": "10.9.0.0/16", "scope": "link"}])

    def test_a_routes_source_and_mtu_are_kept(self) -> None:
        network = Network(
            MAC, "10.0.0.2/24", "", routes=(Route("10.9.0.0/16", "10.0.0.1", "10.0.0.2", 1400),)
        )
        card = self.card(network, NetworkConfig.STATIC)
        assert isinstance(card, dict)
        expected = {"to": "10.9.0.0/16", "via": "10.0.0.1", "from": "10.0.0.2", "mtu": 1400}
        self.assertEqual(card["routes"], [expected])

    def test_a_network_without_router_and_resolvers_has_neither(self) -> None:
        found = version_2(Network(MAC, "10.0.0.2/24", ""), NetworkConfig.STATIC, Resolvers())
        expected = {"pod0": {"match": {"macaddress": MAC}, "addresses": ["10.0.0.2/24"]}}
        self.assertEqual(found["ethernets"], expected)


class NetworkDataTests(SynchronousTestCase):
    def test_dhcp(self) -> None:
        self.assertEqual(
            network_data(BRIDGED, NetworkConfig.DHCP, DNS),
            {
                "links": [{"id": "pod0", "type": "phy", "ethernet_mac_address": MAC, "mtu": 1500}],
                "networks": [{"id": "net0", "type": "ipv4_dhcp", "link": "pod0", "network_id": "net0"}],
                "services": [],
            },
        )

    def test_addresses_of_both_families_each_with_its_routes(self) -> None:
        found = network_data(ROUTED, NetworkConfig.STATIC, DNS)
        self.assertEqual(
            found["networks"],
            [
                {
                    "id": "net0", "type": "ipv4", "link": "pod0", "network_id": "net0",
                    "ip_address": "10.1.2.3", "netmask": "255.255.255.255",
                    "routes": [{"network": "0.0.0.0", "netmask": "0.0.0.0", "gateway": "169.254.1.1"}],
                },
                {
                    "id": "net1", "type": "ipv6", "link": "pod0", "network_id": "net1",
                    "ip_address": "fd00:1::7", "netmask": "ffff:ffff:ffff:ffff::",
                    "routes": [{"network": "::", "netmask": "::", "gateway": "fe80::1"}],
                },
            ],
        )  # fmt: skip
        self.assertEqual(found["services"], [{"type": "dns", "address": each} for each in DNS.servers])

    def test_ipv6_is_said_beside_dhcp(self) -> None:
        found = network_data(ROUTED, NetworkConfig.DHCP, DNS)["networks"]
        assert isinstance(found, list)
        self.assertEqual([each["type"] for each in found], ["ipv4_dhcp", "ipv6"])
        self.assertEqual(len(found[1]["routes"]), 1)
