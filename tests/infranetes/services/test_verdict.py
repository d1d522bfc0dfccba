# SPDX-License-Identifier: Apache-2.0
"""What becomes of a pod's connection, as it is told to people."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

from twisted.trial.unittest import SynchronousTestCase

from infranetes.kubernetes.fields import Name
from infranetes.services.objects import OwnNode, endpoint_slice, service
from infranetes.services.rules import Key
from infranetes.services.table import RuleTable
from infranetes.services.verdict import Outcome, Verdict, judge
from tests.infranetes.services import objects as written


class VerdictTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.table = RuleTable(OwnNode("here"))

    def put(self, item: written.Json, *endpoints: str, node: str = "here") -> None:
        found = service(item)
        assert found is not None
        self.table.put_service(found)
        its = [written.endpoint(each, node=node) for each in endpoints]
        its_slice = endpoint_slice(written.endpoint_slice(*its, service=found.name.name))
        assert its_slice is not None
        self.table.put_slice(its_slice)

    def judged(self, address: str, port: int = 80, own: str = "10.244.0.5") -> Verdict:
        return judge(self.table, Key(ip_address(address), "TCP", port), [ip_address(own)])

    def test_it_goes_to_endpoints(self) -> None:
        self.put(written.service(sessionAffinity="ClientIP"), "10.1.0.1", "10.1.0.2")
        found = self.judged("10.96.0.10")
        self.assertEqual((found.outcome, found.why, found.affinity_seconds), (Outcome.TRANSLATED, "", 10800))
        self.assertEqual([str(address) for address, _ in found.endpoints], ["10.1.0.1", "10.1.0.2"])

    def test_without_endpoints_it_is_refused_or_dropped(self) -> None:
        self.put(written.service())
        self.put(written.service("b", ("10.96.0.11",), internalTrafficPolicy="Local"), "10.1.0.1", node="b")
        self.assertEqual(self.judged("10.96.0.10").outcome, Outcome.REFUSED)
        found = self.judged("10.96.0.11")
        self.assertEqual(found.outcome, Outcome.DROPPED)
        self.assertIn("internalTrafficPolicy is Local", found.why)

    def test_who_may_not_come_is_dropped(self) -> None:
        ranges = [f"192.0.{number}.0/24" for number in range(7)]
        item = written.service(loadBalancerSourceRanges=ranges)
        item["status"] = {"loadBalancer": {"ingress": [{"ip": "203.0.113.1"}]}}
        self.put(item, "10.1.0.1")
        self.assertEqual(self.judged("203.0.113.1", own="192.0.6.1").outcome, Outcome.TRANSLATED)
        self.assertEqual(self.judged("10.96.0.10").outcome, Outcome.TRANSLATED)
        found = self.judged("203.0.113.1")
        self.assertEqual(found.outcome, Outcome.DROPPED)
        self.assertTrue(found.why.endswith(": " + ", ".join(ranges[:5]) + ", ..."), found.why)
        item["spec"]["loadBalancerSourceRanges"] = ranges[:5]
        self.put(item, "10.1.0.1")
        self.assertTrue(self.judged("203.0.113.1").why.endswith(": " + ", ".join(ranges[:5])))

    def test_an_address_without_a_rule_for_the_port(self) -> None:
        self.put(written.service(externalIPs=["192.0.2.1"], ports=[written.port(81), written.port(80)]))
        self.put(written.service("b", ("10.96.0.11",)))
        self.table.put_ranges(Name("", "a"), (ip_network("10.96.0.0/24"), ip_network("fd00::/108")))
        found = self.judged("10.96.0.10", 90)
        self.assertEqual(found.outcome, Outcome.OTHER_PORT)
        self.assertTrue(found.why.endswith("80/tcp, 81/tcp"), found.why)
        found = self.judged("10.96.0.99")
        self.assertEqual(found.outcome, Outcome.UNALLOCATED)
        self.assertIn("10.96.0.0/24", found.why)
        for address in ("192.0.2.1", "10.97.0.1"):
            self.assertEqual(self.judged(address, 90).outcome, Outcome.UNTOUCHED, address)
