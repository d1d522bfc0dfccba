# SPDX-License-Identifier: Apache-2.0
"""Addresses are used in turn; what is no subnet is refused."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import InvalidArgument, ResourceExhausted
from infranetes_simulation.provider.addresses import free_address, subnet


class AddressesTests(SynchronousTestCase):
    def test_the_first_address_is_the_gateways_and_the_second_the_first_pods(self) -> None:
        self.assertEqual(free_address(subnet("10.0.0.0/24"), []), "10.0.0.2")

    def test_addresses_go_round(self) -> None:
        network = subnet("10.0.0.0/29")  # .2 to .6 are pods'
        self.assertEqual(free_address(network, [], after="10.0.0.2"), "10.0.0.3")
        self.assertEqual(free_address(network, [], after="10.0.0.6"), "10.0.0.2")
        self.assertEqual(free_address(network, ["10.0.0.2"], after="10.0.0.6"), "10.0.0.3")

    def test_a_full_subnet_says_so(self) -> None:
        taken = {"10.0.0.2"}
        error = self.assertRaises(ResourceExhausted, free_address, subnet("10.0.0.0/30"), taken, "10.0.0.2")
        self.assertIn("10.0.0.0/30", str(error))

    def test_what_has_no_room_for_a_pod_is_no_subnet(self) -> None:
        for cidr in ("", "pods", "10.0.0.0/33", "10.0.0.1/24", "10.0.0.0/31", "10.0.0.1", "fe80::/64"):
            self.assertIn(repr(cidr), str(self.assertRaises(InvalidArgument, subnet, cidr)))

    @given(st.integers(24, 30), st.data())
    def test_an_address_is_a_free_pods_address_as_long_as_there_is_one(
        self, prefix: int, data: st.DataObject
    ) -> None:
        network = IPv4Network(f"10.1.2.0/{prefix}")
        pods = [str(IPv4Address(int(network[2]) + n)) for n in range(network.num_addresses - 3)]
        taken = data.draw(st.sets(st.sampled_from(pods)))
        after = data.draw(st.sampled_from(["", *pods]))
        if len(taken) == len(pods):
            self.assertRaises(ResourceExhausted, free_address, network, taken, after)
        else:
            self.assertIn(free_address(network, taken, after), set(pods) - taken)
