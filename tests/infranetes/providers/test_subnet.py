# SPDX-License-Identifier: Apache-2.0
"""The pods' subnet, and the addresses in it."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers import subnet
from infranetes_common.errors import InvalidArgument, ResourceExhausted


class SubnetTests(SynchronousTestCase):
    """The pods' subnet."""

    def test_kubelet_gives_one_or_two_families(self) -> None:
        for text in ("10.1.0.0/16", "10.1.0.0/16,fd00::/64", "fd00::/64, 10.1.0.0/16"):
            self.assertEqual(subnet.subnet(text), IPv4Network("10.1.0.0/16"))

    def test_what_can_not_serve_pods_is_refused(self) -> None:
        wrong = (
            "", "x", "10.0.0.1", "10.0.0.1/24", "10.0.0.0/31", "10.0.0.0/4", "fd00::/64", "127.0.0.0/8",
            "224.0.0.0/8", "169.254.0.0/16", "10.0.0.0/24,10.1.0.0/24", "10.0.0.0/24,",
        )  # fmt: skip
        for text in wrong:
            self.assertRaises(InvalidArgument, subnet.subnet, text)

    @given(st.integers(min_value=22, max_value=30), st.data())
    def test_no_address_is_given_twice_until_all_are_taken(self, prefix: int, data: Any) -> None:
        network = IPv4Network(("10.7.0.0", prefix))
        last = data.draw(st.sampled_from([None, IPv4Address("10.9.9.9"), *network]))
        taken: set[IPv4Address] = set()
        for _ in range(network.num_addresses - 3):
            last = subnet.free_address(network, taken, last)
            self.assertIn(last, network)
            self.assertNotIn(last, {*taken, network[0], network[-1], subnet.gateway(network)})
            taken.add(last)
        with self.assertRaises(ResourceExhausted) as caught:
            subnet.free_address(network, taken, last)
        self.assertIn(str(network), str(caught.exception))

    def test_an_address_given_back_rests_while_there_are_others(self) -> None:
        network = IPv4Network("10.7.0.0/24")
        first = subnet.free_address(network, set(), None)
        self.assertNotEqual(subnet.free_address(network, set(), first), first)

    def test_an_address_has_one_mac(self) -> None:
        self.assertEqual(subnet.mac_of(IPv4Address("10.88.1.255")), "0a:58:0a:58:01:ff")
