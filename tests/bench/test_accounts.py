# SPDX-License-Identifier: Apache-2.0
"""What many nodes use of an account is counted against the limits that the simulators enforce."""

from __future__ import annotations

import random

from twisted.trial.unittest import SynchronousTestCase

from bench.accounts import HOUR, Request, replay, uses
from bench.quota import shifted

LIST = {"Action": "DescribeInstances", "Filter.1.Name": "tag:infranetes-node"}
UNFILTERED = {"Action": "DescribeInstances"}


def every(seconds: float, parameters: dict[str, str]) -> list[Request]:
    """Return the requests of an hour."""
    return [Request(number * seconds, parameters) for number in range(int(HOUR / seconds))]


class UsesTests(SynchronousTestCase):
    def test_ec2_has_a_smaller_bucket_for_lists_without_a_filter(self) -> None:
        narrow, wide = every(36.0, LIST), every(36.0, UNFILTERED)
        found = {use.quota: use.percent for use in uses("aws", [*narrow, *wide], 1.0, 1000)}
        hundred = 100.0 * 100 * 1000
        self.assertEqual(
            found,
            {
                "DescribeInstances": hundred / (20 * HOUR),
                "DescribeInstances of all": hundred / (10 * HOUR),
            },
        )

    def test_a_list_of_azures_counts_twice(self) -> None:
        found = uses("azure", every(360.0, {"Action": "list VMs"}), 1.0, 900)
        self.assertEqual(
            [(use.quota, use.calls, use.most) for use in found],
            [("Compute's HighCostGet", 9000.0, 18000.0), ("Resource Manager's reads", 9000.0, 90000.0)],
        )

    def test_tokens_count_where_their_service_is_limited(self) -> None:
        token = every(1800.0, {"Action": "token"})
        self.assertEqual(uses("azure", token, 1.0, 10), [])
        self.assertEqual(uses("gcp", token, 1.0, 10), [])
        self.assertEqual([use.quota for use in uses("openstack", token, 1.0, 10)], ["Keystone"])

    def test_the_scarcest_is_the_first(self) -> None:
        requests = [*every(60.0, {"Action": "get servers"}), *every(600.0, {"Action": "token"})]
        self.assertEqual([use.quota for use in uses("openstack", requests, 1.0, 1000)], ["Keystone", "Nova"])

    def test_vcenter_limits_no_requests(self) -> None:
        self.assertEqual(uses("vsphere", every(1.0, {"Action": "RetrievePropertiesEx"}), 1.0, 1000), [])


class ReplayTests(SynchronousTestCase):
    def test_what_an_account_can_serve_it_serves(self) -> None:
        traces = shifted(every(100.0, LIST), 1000, random.Random(1))  # noqa: S311
        self.assertEqual(replay("aws", traces), 0)

    def test_what_is_too_much_is_refused(self) -> None:
        """Eighty lists a second, of which twenty are served."""
        traces = shifted(every(15.0, LIST), 1200, random.Random(1))  # noqa: S311
        asked = sum(map(len, traces))
        self.assertTrue(0.74 < replay("aws", traces) / asked < 0.76)

    def test_nodes_make_the_same_requests_at_other_times_of_the_hour(self) -> None:
        (one, other) = shifted([Request(10.0, LIST), Request(20.0, UNFILTERED)], 2, random.Random(1))  # noqa: S311
        self.assertNotEqual([each.at for each in one], [each.at for each in other])
        for trace in (one, other):
            self.assertEqual(sorted(len(each.parameters) for each in trace), [1, 2])
            self.assertTrue(all(0.0 <= each.at < HOUR for each in trace))
