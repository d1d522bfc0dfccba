# SPDX-License-Identifier: Apache-2.0
"""Ranges of addresses, compared with Python's `ipaddress`."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, collapse_addresses, ip_network

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.policies import addresses
from infranetes.policies.addresses import (
    Range,
    address,
    block,
    merged,
    networks,
    ordered,
    runs,
    without,
)
from tests.infranetes.policies.world import result

V4 = st.builds(
    lambda number, length: f"{ip_network((0x0A000000 + number, 32)).network_address}/{length}",
    st.integers(0, 64),
    st.integers(26, 32),
)
V6 = st.builds(lambda number, length: f"fd00::{number:x}/{length}", st.integers(0, 64), st.integers(122, 128))


def as_networks(*ranges: Range) -> list[IPv4Network | IPv6Network]:
    return list(result(networks(result(merged(ranges)))))


def collapsed(texts: list[str]) -> list[IPv4Network | IPv6Network]:
    found = [ip_network(each, strict=False) for each in texts]
    v4 = collapse_addresses(each for each in found if isinstance(each, IPv4Network))
    v6 = collapse_addresses(each for each in found if isinstance(each, IPv6Network))
    return [*v4, *v6]


class RangeTests(SynchronousTestCase):
    @given(st.lists(V4 | V6, max_size=20))
    def test_networks_are_as_few_as_can_be(self, texts: list[str]) -> None:
        self.assertEqual(as_networks(*map(block, texts)), collapsed(texts))

    @given(st.sampled_from(("10.0.0.0/26", "10.0.0.32/27", "0.0.0.0/0")), st.lists(V4, max_size=8))
    def test_what_is_excepted_is_left_out(self, whole: str, excepted: list[str]) -> None:
        left = [ip_network(whole)]
        for each in map(ip_network, {str(ip_network(each, strict=False)) for each in excepted}):
            rest = []
            for one in left:
                if not one.overlaps(each):
                    rest.append(one)
                elif each.prefixlen > one.prefixlen:
                    rest.extend(one.address_exclude(each))  # type: ignore[arg-type]  # both are IPv4
            left = rest
        self.assertEqual(
            as_networks(*without(block(whole), map(block, excepted))), collapsed([str(each) for each in left])
        )

    def test_what_is_excepted_at_an_edge_or_altogether(self) -> None:
        first, end = block("10.0.0.0/29")
        for excepted, left in (
            ([(first, first)], [(first + 1, end)]),
            ([(end, end)], [(first, end - 1)]),
            ([(first, end)], []),
            ([(first - 1, end + 1)], []),
            ([(first - 1, first - 1), (end + 1, end + 1)], [(first, end)]),
            ([(first + 4, first + 5), (first + 1, first + 1)],
             [(first, first), (first + 2, first + 3), (first + 6, end)]),
        ):  # fmt: skip
            self.assertEqual(without((first, end), excepted), left)

    def test_ranges_side_by_side_or_within_one_another_are_one(self) -> None:
        for given_ranges, expected in (
            ([(1, 2), (3, 4)], [(1, 4)]),
            ([(1, 2), (4, 5)], [(1, 2), (4, 5)]),
            ([(1, 9), (2, 3), (9, 9)], [(1, 9)]),
            ([(5, 6), (1, 5)], [(1, 6)]),
        ):
            self.assertEqual(result(merged(given_ranges)), expected)
        self.assertEqual(runs([0, 1, 2, 4]), [(0, 2), (4, 4)])
        self.assertEqual(runs([]), [])

    def test_a_family_s_first_address_and_all_of_it_are_of_that_family(self) -> None:
        for text in ("0.0.0.0/0", "::/0", "0.0.0.0/32", "::/128", "::/127"):
            self.assertEqual([str(each) for each in as_networks(block(text))], [text])

    def test_the_network_of_one_address_is_the_same_object_each_time(self) -> None:
        """So comparing large firewalls is cheap."""
        for text in ("10.0.0.1/32", "fd00::1/128"):
            self.assertIs(as_networks(block(text))[0], as_networks(block(text))[0])

    def test_exceptions_of_the_other_family_leave_everything(self) -> None:
        self.assertEqual(without(block("10.0.0.0/8"), [block("::/0")]), [block("10.0.0.0/8")])

    @given(st.lists(st.integers(0, 40), max_size=30))
    def test_however_many_are_sorted_at_a_time(self, numbers: list[int]) -> None:
        self.patch(addresses, "SORTED", 3)
        self.patch(addresses, "STEP", 2)
        self.assertEqual(result(ordered(numbers)), sorted(numbers))

    @given(st.sets(st.integers(0, 40), max_size=30))
    def test_runs_of_numbers(self, numbers: set[int]) -> None:
        self.assertEqual(runs(sorted(numbers)), result(merged((each, each) for each in numbers)))

    def test_many_ranges_become_networks_in_small_steps(self) -> None:
        its = [(number, number) for number in range(address("10.0.0.0"), address("10.0.32.0"), 2)]
        self.assertEqual(len(list(networks(its))), 5)
        self.assertEqual(len(as_networks(*its)), 4096)

    def test_what_is_no_address_or_network_is_refused(self) -> None:
        for text in ("", "x", "10.0.0.256", "10.0.0.1/8", "fe80::1%eth0", "\0", "1" * 1000):
            self.assertRaises(ValueError, address, text)
        for text in (
            "",
            "10.0.0.1",
            "10.0.0.1/",
            "10.0.0.1/33",
            "10.0.0.1/" + "1" * 5000,
            "::/129",
            "::/-1",
            "::/\u0661",
            "10.0.0.1/ 8",
        ):
            self.assertRaises(ValueError, block, text)
