# SPDX-License-Identifier: Apache-2.0
"""How objects that the API server shows, or shows no more, enter the table, and who is told of it."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.kubernetes.fields import Name
from infranetes.services.cluster import ClusterServices
from infranetes.services.kinds import OwnNodes, ServiceRanges, Services, Slices
from infranetes.services.objects import OwnNode, service
from infranetes.services.table import RuleTable
from infranetes_common.errors import InvalidArgument
from tests.infranetes.services import objects as written


class KindTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.table = RuleTable(OwnNode("here", "zone-a"))

    def endpoints(self) -> dict[str, int]:
        return {str(key.address): len(rule.endpoints) for key, rule in self.table.rules.items()}

    def done(self, steps: Any) -> None:
        self.assertEqual(list(steps), [])

    def test_services_and_slices_come_and_go(self) -> None:
        services, slices = Services(self.table), Slices(self.table)
        self.done(services.put(written.service()))
        self.done(slices.put(written.endpoint_slice(written.endpoint("10.1.0.1"))))
        self.assertEqual(self.endpoints(), {"10.96.0.10": 1})
        self.done(slices.remove(Name("ns", "web-1")))
        self.assertEqual(self.endpoints(), {"10.96.0.10": 0})
        self.done(services.remove(Name("ns", "web")))
        self.assertEqual(self.endpoints(), {})

    def test_what_is_not_served_here_is_none(self) -> None:
        self.assertIsNone(Services(self.table).put(written.service(ips=("None",))))
        self.assertIsNone(Slices(self.table).put(written.endpoint_slice(kind="FQDN")))

    def test_ranges_come_and_go_and_must_have_a_name(self) -> None:
        ranges = ServiceRanges(self.table)
        item = {"metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/12"]}}
        self.done(ranges.put(item))
        self.assertEqual(len(self.table.ranges), 1)
        self.done(ranges.remove(Name("", "kubernetes")))
        self.assertEqual(self.table.ranges, ())
        self.assertRaises(InvalidArgument, ranges.put, {**item, "metadata": {}})

    def test_the_node_moves_and_stays_where_it_was_when_it_is_deleted(self) -> None:
        nodes = OwnNodes(self.table, "here")
        self.done(Services(self.table).put(written.service()))
        zones = (("10.1.0.1", "zone-a"), ("10.1.0.2", "b"), ("10.1.0.3", "b"))
        its = [written.endpoint(address, zones=[zone]) for address, zone in zones]
        self.done(Slices(self.table).put(written.endpoint_slice(*its)))
        self.assertEqual(self.endpoints(), {"10.96.0.10": 1})
        self.done(nodes.put({"metadata": {"name": "here", "labels": {"topology.kubernetes.io/zone": "b"}}}))
        self.assertEqual(self.endpoints(), {"10.96.0.10": 2})
        self.done(nodes.remove(Name("", "here")))
        self.assertEqual(self.endpoints(), {"10.96.0.10": 2})


class ClusterTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.services = ClusterServices(cast(Any, self.clock), cast(Any, None), "here")

    def test_what_changes_is_told_with_whether_all_is_known(self) -> None:
        told = self.services.changed.wait()
        self.assertFalse(self.services.table.complete)
        self.services._renew()
        self.successResultOf(told)
        self.assertEqual(self.services.table.complete, self.services.complete)

    def test_changes_are_dated_when_they_were_received_however_long_they_take(self) -> None:
        table = self.services.table

        def steps() -> Any:
            for number in range(3):
                table.put_service(_service(number))
                self.clock.rightNow += 1.0
                yield

        self.clock.rightNow = 5.0
        for _ in self.services._noted(steps(), 5.0):
            self.assertEqual(table.news.after(0), 5.0, "known while it is still going on")
        table.put_service(_service(9))
        self.assertEqual(list(self.services._noted((), 7.0)), [])
        self.assertEqual([table.news.after(number) for number in (0, 2, 3)], [5.0, 5.0, 7.0])


def _service(number: int) -> Any:
    return service(written.service(f"s{number}", (f"10.96.0.{number}",)))
