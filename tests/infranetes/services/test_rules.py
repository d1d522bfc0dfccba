# SPDX-License-Identifier: Apache-2.0
"""Where connections to a Service's addresses go."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any, cast

from twisted.trial.unittest import SynchronousTestCase

from infranetes.services import endpoints
from infranetes.services.objects import OwnNode, endpoint_slice, service
from infranetes.services.rules import Key, Rule, Without, rules
from tests.infranetes.services import objects as written

HERE = OwnNode("here", "zone-a")
Json = written.Json


class RuleCase(SynchronousTestCase):
    def rules(self, item: Json, *slices: Json) -> dict[Key, Rule]:
        read = service(item)
        assert read is not None
        return rules(read, [found for each in slices if (found := endpoint_slice(each))], HERE)

    def reached(self, item: Json, *slices: Json, address: str = "10.96.0.10") -> list[str]:
        """Return the endpoints to which connections to port 80 of an address go."""
        rule = self.rules(item, *slices)[Key(ip_address(address), "TCP", 80)]
        return [f"{target}:{port}" for target, port in rule.endpoints]


class EndpointTests(RuleCase):
    def test_of_more_than_a_vm_takes_some_are_used(self) -> None:
        self.patch(endpoints, "MOST_ENDPOINTS", 2)
        slices = written.endpoint_slice(*(written.endpoint(f"10.1.0.{each}") for each in (3, 1, 2)))
        self.assertEqual(self.reached(written.service(), slices), ["10.1.0.1:8080", "10.1.0.2:8080"])

    def test_ready_ones_alone(self) -> None:
        slices = written.endpoint_slice(
            written.endpoint("10.1.0.2"),
            written.endpoint("10.1.0.1"),
            written.endpoint("10.1.0.3", ready=False),
        )
        self.assertEqual(self.reached(written.service(), slices), ["10.1.0.1:8080", "10.1.0.2:8080"])

    def test_terminating_ones_that_still_serve_if_none_is_ready(self) -> None:
        slices = written.endpoint_slice(
            written.endpoint("10.1.0.1", ready=False, serving=True, terminating=True),
            written.endpoint("10.1.0.2", ready=False, serving=False, terminating=True),
            written.endpoint("10.1.0.3", ready=False),
            written.endpoint("10.1.0.4", ready=False, serving=True),
        )
        self.assertEqual(self.reached(written.service(), slices), ["10.1.0.1:8080"])

    def test_hints_count_only_if_all_ready_ones_have_them(self) -> None:
        for kind, near, far in (("zones", "zone-a", "zone-b"), ("nodes", "here", "there")):
            near_hint, far_hint = cast(Any, {kind: [near]}), cast(Any, {kind: [far]})
            hinted = (
                written.endpoint("10.1.0.1", **near_hint),
                written.endpoint("10.1.0.2", **far_hint),
            )
            unready = written.endpoint("10.1.0.3", ready=False)
            bare = written.endpoint("10.1.0.4")
            for given, last in (((*hinted, unready), [1]), ((*hinted, bare), [1, 2, 4]), (hinted[1:], [2])):
                found = self.reached(written.service(), written.endpoint_slice(*given))
                self.assertEqual(found, [f"10.1.0.{each}:8080" for each in last], (kind, last))

    def test_of_several_slices_each_counts_once(self) -> None:
        leaving = written.endpoint("10.1.0.1", ready=False, serving=True, terminating=True)
        slices = [
            written.endpoint_slice(leaving, written.endpoint("10.1.0.2"), name="a"),
            written.endpoint_slice(written.endpoint("10.1.0.1"), written.endpoint("10.1.0.2"), name="b"),
        ]
        for given in (slices, slices[::-1]):
            self.assertEqual(self.reached(written.service(), *given), ["10.1.0.1:8080", "10.1.0.2:8080"])

    def test_slices_may_have_other_numbers_for_one_port(self) -> None:
        slices = [
            written.endpoint_slice(written.endpoint("10.1.0.1"), name="a"),
            written.endpoint_slice(written.endpoint("10.1.0.2"), name="b", ports=[written.port(81)]),
        ]
        self.assertEqual(self.reached(written.service(), *slices), ["10.1.0.1:8080", "10.1.0.2:81"])

    def test_ports_go_by_name_and_protocol(self) -> None:
        item = written.service(
            ports=[written.port(80, "x"), written.port(80, "x", "UDP"), written.port(53, "y", "UDP")]
        )
        ports = [written.port(1, "x"), written.port(2, "x", "UDP"), written.port(3, "z", "UDP")]
        found = self.rules(item, written.endpoint_slice(written.endpoint("10.1.0.1"), ports=ports))
        numbers = {
            (key.protocol, key.port): [port for _, port in rule.endpoints] for key, rule in found.items()
        }
        self.assertEqual(numbers, {("TCP", 80): [1], ("UDP", 80): [2], ("UDP", 53): []})

    def test_families_stay_apart(self) -> None:
        item = written.service(ips=("10.96.0.10", "fd00::a"))
        slices = [
            written.endpoint_slice(written.endpoint("10.1.0.1"), name="4"),
            written.endpoint_slice(written.endpoint("fd00::1"), name="6", kind="IPv6"),
        ]
        self.assertEqual(self.reached(item, *slices), ["10.1.0.1:8080"])
        self.assertEqual(self.reached(item, *slices, address="fd00::a"), ["fd00::1:8080"])


class NearnessTests(RuleCase):
    def near(self, *endpoints: Json) -> list[str]:
        found = self.reached(written.service(), written.endpoint_slice(*endpoints))
        return [each.rpartition(".")[2].partition(":")[0] for each in found]

    def test_hints_for_zones(self) -> None:
        a, b = written.endpoint("10.1.0.1", zones=["zone-a"]), written.endpoint("10.1.0.2", zones=["zone-b"])
        self.assertEqual(self.near(a, b), ["1"])

    def test_hints_for_nodes_come_first(self) -> None:
        a = written.endpoint("10.1.0.1", zones=["zone-a"], nodes=["there"])
        b = written.endpoint("10.1.0.2", zones=["zone-b"], nodes=["here"])
        self.assertEqual(self.near(a, b), ["2"])

    def test_hints_for_zones_if_those_for_nodes_name_others(self) -> None:
        a = written.endpoint("10.1.0.1", zones=["zone-a"], nodes=["there"])
        b = written.endpoint("10.1.0.2", zones=["zone-b"], nodes=["elsewhere"])
        self.assertEqual(self.near(a, b), ["1"])

    def test_none_counts_unless_every_ready_endpoint_has_one(self) -> None:
        a, b = written.endpoint("10.1.0.1", zones=["zone-a"]), written.endpoint("10.1.0.2")
        self.assertEqual(self.near(a, b), ["1", "2"])
        gone = written.endpoint("10.1.0.3", ready=False)
        self.assertEqual(self.near(a, gone), ["1"])

    def test_none_counts_if_all_are_for_elsewhere(self) -> None:
        self.assertEqual(self.near(written.endpoint("10.1.0.1", zones=["zone-b"])), ["1"])


class AddressTests(RuleCase):
    HERE_AND_THERE = written.endpoint_slice(
        written.endpoint("10.1.0.1"), written.endpoint("10.1.0.2", "there")
    )
    THERE = written.endpoint_slice(written.endpoint("10.1.0.2", "there"))

    def rule(self, item: Json, *slices: Json, address: str = "10.96.0.10") -> Rule:
        return self.rules(item, *slices)[Key(ip_address(address), "TCP", 80)]

    def test_without_endpoints_connections_are_refused(self) -> None:
        rule = self.rule(written.service())
        self.assertEqual((rule.endpoints, rule.without, rule.cluster_ip), ((), Without.REFUSED, True))

    def test_local_ones_stay_on_the_node(self) -> None:
        item = written.service(internalTrafficPolicy="Local")
        self.assertEqual(self.reached(item, self.HERE_AND_THERE), ["10.1.0.1:8080"])

    def test_local_ones_without_an_endpoint_here_are_dropped(self) -> None:
        item = written.service(internalTrafficPolicy="Local")
        for slices, without in (((self.THERE,), Without.DROPPED), ((), Without.REFUSED)):
            rule = self.rule(item, *slices)
            self.assertEqual((rule.endpoints, rule.without), ((), without))

    def test_pods_reach_external_addresses_everywhere_whatever_is_local(self) -> None:
        item = written.service(
            externalIPs=["192.0.2.1"], internalTrafficPolicy="Local", externalTrafficPolicy="Local"
        )
        self.assertEqual(self.reached(item, self.THERE, address="192.0.2.1"), ["10.1.0.2:8080"])

    def test_external_addresses_of_a_family_without_cluster_ip_have_no_rules(self) -> None:
        virtual = {"loadBalancer": {"ingress": [{"ip": "198.51.100.1"}, {"ip": "2001:db8::2"}]}}
        item: Any = {**written.service(externalIPs=["192.0.2.1", "2001:db8::1"]), "status": virtual}
        found = {str(key.address) for key in self.rules(item)}
        self.assertEqual(found, {"10.96.0.10", "192.0.2.1", "198.51.100.1"})

    def test_source_ranges_hold_for_addresses_of_their_family(self) -> None:
        virtual = {"loadBalancer": {"ingress": [{"ip": "198.51.100.1"}, {"ip": "2001:db8::2"}]}}
        for ranges, expected in (
            (["10.0.0.0/8", "fd00::/8"], {"198.51.100.1": "10.0.0.0/8", "2001:db8::2": "fd00::/8"}),
            (["10.0.0.0/8"], {"198.51.100.1": "10.0.0.0/8", "2001:db8::2": ""}),
            (["10.0.0.0/8", "0.0.0.0/0", "fd00::/8"], {"198.51.100.1": "", "2001:db8::2": "fd00::/8"}),
        ):
            item = written.service(ips=("10.96.0.10", "fd00::10"), loadBalancerSourceRanges=ranges)
            found = {
                str(key.address): " ".join(map(str, rule.source_ranges))
                for key, rule in self.rules({**item, "status": virtual}).items()
                if not rule.cluster_ip
            }
            self.assertEqual(found, expected)

    def test_source_ranges_hold_for_the_load_balancer_s_address_alone(self) -> None:
        item: Any = written.service(externalIPs=["192.0.2.1"], loadBalancerSourceRanges=["10.0.0.0/8"])
        item["status"] = {"loadBalancer": {"ingress": [{"ip": "192.0.2.2"}]}}
        found = {
            str(key.address): (len(rule.source_ranges), rule.cluster_ip)
            for key, rule in self.rules(item).items()
        }
        self.assertEqual(found, {"10.96.0.10": (0, True), "192.0.2.1": (0, False), "192.0.2.2": (1, False)})


class OtherFieldTests(RuleCase):
    """What a rule says besides its endpoints."""

    def test_each_has_the_affinity_and_only_a_cluster_ip_refuses_other_ports(self) -> None:
        item = written.service(
            externalIPs=["192.0.2.1", "10.96.0.10"],
            sessionAffinity="ClientIP",
            sessionAffinityConfig={"clientIP": {"timeoutSeconds": 60}},
        )
        item["status"] = {"loadBalancer": {"ingress": [{"ip": "192.0.2.2"}]}}
        found = {str(key.address): rule for key, rule in self.rules(item).items()}
        self.assertEqual({address: rule.cluster_ip for address, rule in found.items()},
                         {"10.96.0.10": True, "192.0.2.1": False, "192.0.2.2": False})  # fmt: skip
        self.assertEqual({rule.affinity_seconds for rule in found.values()}, {60})

    def test_only_a_local_one_without_endpoints_here_drops(self) -> None:
        elsewhere = written.endpoint_slice(written.endpoint("10.1.0.1", node="there"))
        for policy, slices, without in (
            ("Local", [elsewhere], Without.DROPPED),
            ("Local", [], Without.REFUSED),
            ("Cluster", [elsewhere], Without.REFUSED),
        ):
            (rule,) = self.rules(written.service(internalTrafficPolicy=policy), *slices).values()
            self.assertEqual(rule.without, without)
