# SPDX-License-Identifier: Apache-2.0
"""A pod's firewall: as JSON, and as rules. The rules are put to the kernel by their users' tests."""

from __future__ import annotations

from ipaddress import ip_network

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.pod_firewall import CLOSED, OPEN, Allowed, PodFirewall, Ports, decode, encode
from infranetes_common.pod_firewall_rules import Way, chains

NETWORKS = (ip_network("10.0.0.0/8"), ip_network("192.0.2.1/32"), ip_network("fd00::/8"))
PORTS = (Ports("SCTP", 7, 7), Ports("TCP", 80, 90))
RICH = PodFirewall(ingress=(Allowed(NETWORKS), Allowed(NETWORKS[:1], PORTS)), egress=(Allowed((), ()),))


class JsonTests(SynchronousTestCase):
    def test_what_is_written_is_read(self) -> None:
        for firewall in (OPEN, CLOSED, RICH):
            self.assertEqual(decode(encode(firewall)), firewall)

    def test_what_is_no_firewall_is_an_error(self) -> None:
        no_network = '{"ingress": [{"networks": ["x"], "ports": null}], "egress": []}'
        no_ports = '{"ingress": [{"networks": [], "ports": [[1]]}], "egress": []}'
        unfinished = '{"ingress": null}'
        for text in ("", "[]", "null", "3", "{}", unfinished, no_network, no_ports):
            self.assertRaises(ValueError, decode, text)


class RulesTests(SynchronousTestCase):
    def test_an_open_way_has_no_rules(self) -> None:
        self.assertEqual(chains("in-x", OPEN, Way.INGRESS), {"in-x": []})

    def test_a_closed_way_lets_the_pod_connect_to_itself(self) -> None:
        rules = chains("in-x", CLOSED, Way.INGRESS, ["10.1.1.1", "fd00::1"])["in-x"]
        self.assertEqual(
            rules,
            ["ct original ip saddr 10.1.1.1 accept", "ct original ip6 saddr fd00::1 accept", "drop"],
        )

    def test_networks_are_one_set_of_each_family_that_is_asked_for(self) -> None:
        four = "ct original ip saddr { 10.0.0.0/8, 192.0.2.1/32 } accept"
        six = "ct original ip6 saddr { fd00::/8 } accept"
        firewall = PodFirewall(ingress=(Allowed(NETWORKS),))
        self.assertEqual(chains("x", firewall, Way.INGRESS)["x"], [four, "drop"])
        self.assertEqual(chains("x", firewall, Way.INGRESS, versions=(4, 6))["x"], [four, six, "drop"])

    def test_rules_with_the_same_ports_share_a_chain(self) -> None:
        firewall = PodFirewall(
            ingress=(Allowed(NETWORKS[:1], PORTS),),
            egress=(Allowed(NETWORKS[1:2], PORTS), Allowed(NETWORKS[:1], PORTS[1:])),
        )
        ingress, egress = (chains("x", firewall, way) for way in Way)
        [shared] = ingress.keys() & egress.keys() - {"x"}
        self.assertEqual(
            ingress[shared],
            [
                "ct original protocol sctp ct reply proto-src 7 accept",
                "ct original protocol tcp ct reply proto-src 80-90 accept",
            ],
        )
        self.assertEqual(ingress[shared], egress[shared])
        self.assertEqual(len(egress), 3)  # its own, and one for each ports

    def test_everyone_is_what_a_set_can_hold(self) -> None:
        rules = chains("x", PodFirewall(egress=(Allowed((ip_network("0.0.0.0/0"),)),)), Way.EGRESS)["x"]
        self.assertEqual(rules, ["ct reply ip saddr { 0.0.0.0/1, 128.0.0.0/1 } accept", "drop"])
