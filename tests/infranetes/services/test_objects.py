# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' objects as the service proxy reads them."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.kubernetes.fields import Name
from infranetes.services import objects
from infranetes.services.objects import (
    Endpoint,
    OwnNode,
    ServicePort,
    endpoint_slice,
    own_node,
    service,
    trimmed,
)
from infranetes_common.errors import InvalidArgument
from tests.infranetes.services import objects as written

FIELDS = [
    "addresses",
    "addressType",
    "clusterIP",
    "clusterIPs",
    "conditions",
    "endpoints",
    "externalIPs",
    "hints",
    "ingress",
    "ip",
    "labels",
    "loadBalancer",
    "metadata",
    "name",
    "port",
    "ports",
    "protocol",
    "sessionAffinityConfig",
    "spec",
    "status",
]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(FIELDS), inner),
)


class TrimmedTests(SynchronousTestCase):
    def test_what_is_kept_is_read_the_same_without_who_has_set_it(self) -> None:
        for item, read in (
            (written.service("web", ("10.96.0.1",), externalIPs=["192.0.2.1"]), service),
            (written.endpoint_slice(written.endpoint("10.0.0.1")), endpoint_slice),
        ):
            item["metadata"] |= {"managedFields": [{"manager": "kubectl"}], "annotations": {"a": "b"}}
            self.assertEqual(read(trimmed(item)), read(item))
            self.assertEqual(set(trimmed(item)["metadata"]) - {"namespace", "name", "labels"}, set())

    def test_what_is_no_object_stays_none(self) -> None:
        wrong: tuple[object, ...] = (None, 1, "x", [])
        for about in wrong:
            self.assertRaises(InvalidArgument, service, trimmed({"metadata": about}))


class ServiceTests(SynchronousTestCase):
    def test_what_is_left_out_is_kubernetes_default(self) -> None:
        item = {"metadata": {"name": "a"}, "spec": {"clusterIP": "10.0.0.1", "ports": [{"port": 1}]}}
        found = service(item)
        assert found is not None
        self.assertEqual(found.name, Name("", "a"))
        self.assertEqual(found.cluster_ips, (ip_address("10.0.0.1"),))
        self.assertEqual(found.ports, (ServicePort("", "TCP", 1),))
        self.assertEqual((found.affinity_seconds, found.internal_local, found.source_ranges), (0, False, ()))

    def test_addresses_of_both_families(self) -> None:
        found = service(written.service(ips=("10.0.0.1", "fd00::1"), externalIPs=["192.0.2.1"]))
        assert found is not None
        self.assertEqual(found.cluster_ips, (ip_address("10.0.0.1"), ip_address("fd00::1")))
        self.assertEqual(found.external_ips, (ip_address("192.0.2.1"),))

    def test_a_load_balancer_s_address_counts_if_packets_keep_it(self) -> None:
        item = written.service(loadBalancerSourceRanges=[" 198.51.100.7/24"])
        ingress = [{"ip": "192.0.2.1"}, {"ip": "192.0.2.2", "ipMode": "Proxy"}, {"hostname": "lb.example"}]
        item["status"] = {"loadBalancer": {"ingress": [*ingress, {"ip": "192.0.2.3", "ipMode": "VIP"}]}}
        found = service(item)
        assert found is not None
        self.assertEqual(found.virtual_ips, (ip_address("192.0.2.1"), ip_address("192.0.2.3")))
        self.assertEqual(found.source_ranges, (ip_network("198.51.100.0/24"),))

    def test_affinity_lasts_three_hours_unless_it_says_otherwise(self) -> None:
        for config, seconds in ((None, 10800), ({"clientIP": {"timeoutSeconds": 5}}, 5)):
            found = service(written.service(sessionAffinity="ClientIP", sessionAffinityConfig=config))
            assert found is not None
            self.assertEqual(found.affinity_seconds, seconds)

    def test_names_that_can_not_be_are_refused(self) -> None:
        """They get into the log and into the answers to infranetes-ctl."""
        for odd in ("a\nb", "\x1b[2J", "\ud800", "x" * 254):
            for part in ("name", "namespace"):
                item = written.service()
                item["metadata"][part] = odd
                error = str(self.assertRaises(InvalidArgument, service, item))
                self.assertIn("can't be a name", error)
                self.assertTrue(error.isprintable() and len(error) < 200, error)

    def test_a_service_of_more_than_vms_take_is_refused(self) -> None:
        """Or the VMs would refuse the message that has it, with the rules of all other Services in it."""
        self.patch(objects, "MOST_RULES_OF_ONE", 6)
        self.patch(objects, "MOST_SOURCE_RANGES", 2)
        ports = [written.port(number, f"p{number}") for number in (1, 2)]
        external = ["192.0.2.1", "192.0.2.2"]
        ranges = ["10.0.0.0/8", "fd00::/8"]
        self.assertTrue(
            service(written.service(ports=ports, externalIPs=external, loadBalancerSourceRanges=ranges))
        )
        config = {"clientIP": {"timeoutSeconds": -1}}
        cases: list[tuple[dict[str, Any], str]] = [  # Any: JSON
            ({"ports": ports, "externalIPs": [*external, "192.0.2.3"]}, "4 addresses with 2 ports each"),
            ({"loadBalancerSourceRanges": [*ranges, "11.0.0.0/8"]}, "3 source ranges"),
            ({"sessionAffinity": "ClientIP", "sessionAffinityConfig": config}, "timeoutSeconds can't be -1"),
        ]
        for spec, words in cases:
            error = self.assertRaises(InvalidArgument, service, written.service(**spec))
            self.assertIn(words, str(error))

    def test_no_proxy_serves_those_without_addresses(self) -> None:
        for spec in ({"clusterIPs": ["None"]}, {"clusterIP": "", "clusterIPs": []}, {"type": "ExternalName"}):
            self.assertIsNone(service(written.service(**spec)), spec)

    def test_another_proxy_s_is_left_to_it(self) -> None:
        item = written.service()
        item["metadata"]["labels"] = {"service.kubernetes.io/service-proxy-name": ""}
        self.assertIsNone(service(item))

    def test_errors_name_the_object_and_the_field(self) -> None:
        for spec, why in (
            ({"ports": [{"port": 0}]}, "Service ns/web: spec: ports: port can't be '0'"),
            ({"ports": [{"port": True}]}, "port can't be 'True'"),
            ({"ports": {}}, "ports can't be '{}'"),
            ({"ports": [written.port(1, protocol="ICMP")]}, "protocol can't be 'ICMP'"),
            ({"clusterIPs": ["10.0.0.256"]}, "an address can't be '10.0.0.256'"),
            ({"loadBalancerSourceRanges": ["x/8"]}, "a range of addresses can't be 'x/8'"),
            ({"loadBalancerSourceRanges": ["fe80::%x;\ndrop"]}, r"addresses can't be 'fe80::%x;\ndrop'"),
            ({"externalIPs": ["fe80::1%x"]}, "an address can't be 'fe80::1%x'"),
        ):
            error = self.assertRaises(InvalidArgument, service, written.service(**spec))
            self.assertIn(why, str(error))

    @given(ANYTHING)
    def test_whatever_comes_is_read_or_refused(self, item: Any) -> None:  # Any: JSON
        for read in (service, endpoint_slice, own_node):
            try:
                read(item)
            except InvalidArgument:
                continue


class SliceTests(SynchronousTestCase):
    def endpoints(self, *given: dict[str, Any]) -> tuple[Endpoint, ...]:  # Any: JSON
        found = endpoint_slice(written.endpoint_slice(*given))
        assert found is not None
        return found.endpoints

    def test_conditions_that_are_left_out(self) -> None:
        first, second = self.endpoints(
            {"addresses": ["10.1.0.1", "10.1.0.2"]},
            {"addresses": []},
            {"addresses": ["10.1.0.3"], "conditions": {"ready": False}},
        )
        self.assertEqual(first, Endpoint(ip_address("10.1.0.1")))
        self.assertEqual((second.ready, second.serving, second.terminating), (False, False, False))

    def test_hints(self) -> None:
        (one,) = self.endpoints(written.endpoint("10.1.0.1", zones=["a", "b"], nodes=["n"]))
        self.assertEqual((one.zone_hints, one.node_hints), ({"a", "b"}, {"n"}))

    def test_ports_without_a_number_or_name_are_left_out(self) -> None:
        item = written.endpoint_slice(ports=[{"name": "all"}, {"port": 5}, written.port(6)])
        found = endpoint_slice(item)
        assert found is not None
        self.assertEqual([each.port for each in found.ports], [6])

    def test_slices_that_are_no_proxy_s_business(self) -> None:
        for item in (
            written.endpoint_slice(service=""),
            written.endpoint_slice(kind="FQDN"),
            written.endpoint_slice(labels={"service.kubernetes.io/headless": ""}),
        ):
            self.assertIsNone(endpoint_slice(item))


class NodeTests(SynchronousTestCase):
    def test_its_zone(self) -> None:
        about = {"name": "n", "labels": {"topology.kubernetes.io/zone": "z"}}
        self.assertEqual(own_node({"metadata": about}), OwnNode("n", "z"))
        self.assertEqual(own_node({"metadata": {"name": "n"}}), OwnNode("n"))
